"""An MCP server written by hand, which starts fast and may break the protocol's rules.

usage: scripted_mcp_server.py LIST [RESULT]

LIST is the JSON text of the listed tools. Every call returns the JSON text RESULT, the content of a
result; `error CODE MESSAGE` instead returns an error of JSON-RPC. Lines that are not messages are
printed as well, as programs do.
"""

import json
import sys


def answer(asked: dict) -> dict:
    match asked["method"]:
        case "initialize":
            version = asked["params"]["protocolVersion"]
            return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}}
        case "tools/list":
            return {"result": {"tools": json.loads(sys.argv[1])}}
    if sys.argv[2].startswith("error "):
        _, code, message = sys.argv[2].split(" ", 2)
        return {"error": {"code": int(code), "message": message}}
    return {"result": {"content": json.loads(sys.argv[2])}}


for line in sys.stdin:
    asked = json.loads(line)
    print("Starting the server ...", flush=True)
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer(asked)}), flush=True)
