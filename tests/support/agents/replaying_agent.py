"""Agent of the tests: sends the recorded requests of another agent, and prints the responses.

usage: replaying_agent.py FILE

FILE has one request per line.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

messages = []
for line in Path(sys.argv[1]).read_text().splitlines():
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", line.encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        messages.append(json.load(response)["choices"][0]["message"])
print(json.dumps(messages))
