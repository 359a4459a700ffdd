"""User mistakes on the command line and the one-line error that each must produce.

A key is what follows `launch/train.py model.path={model} run.dir={tmp}/run` on the command line.
Its value is the text after `error: `; `...` stands for any text. {model} is a valid model, {tmp} is
a folder with the broken files that test_mistakes.py creates, {page} is a web server that is not
vLLM.
"""

NOBODY = "engine.urls={}: no vLLM server responds at this URL (/version...); start it with the command that launch/server_command.py prints"
LISTS_ALL = "--help lists all"
MISTAKES = {
    # unknown keys
    "algo.groop_size=4": "algo.groop_size=4: no such key; did you mean batch.group_size?",
    "+algo.groop_size=4": "algo.groop_size=4: no such key; did you mean batch.group_size?",
    "++algo.groop_size=4": "algo.groop_size=4: no such key; did you mean batch.group_size?",
    "algo.lr=1e6": "algo.lr=1e6: no such key; did you mean optim.lr?",
    "algo.learning_rate=1": "algo.learning_rate=1: no such key; did you mean optim.lr?",
    "num_generations=8": "num_generations=8: no such key; did you mean batch.group_size?",
    "optm.lr=1": "optm.lr=1: no such key; did you mean optim.lr?",
    "lr=1": "lr=1: no such key; did you mean optim.lr?",
    "optim.lr.peak=1": "optim.lr.peak=1: no such key; did you mean optim.lr?",
    "xyzzy=1": "xyzzy=1: no such key; --help all lists all keys",
    "~algo.name": "~algo.name: a setting cannot be removed; set algo.name=VALUE",
    "~algo.nme": "~algo.nme: no such key; did you mean algo.name?",
    "experiment=misspelt": "experiment/misspelt.yaml: algo.groop_size: no such key; did you mean batch.group_size?",
    # values of the wrong type
    "optim.lr=fast": "optim.lr=fast: expects a number",
    "optim.lr=null": "optim.lr=null: expects a number",
    "run.steps=2.5": "run.steps=2.5: expects a whole number",
    "checkpoint.background=yess": "checkpoint.background=yess: expects true or false",
    "task.data.train=mine.jsonl": "task.data.train=mine.jsonl: expects a list; write 'task.data.train=[mine.jsonl]'",
    "model.frozen=vision": "model.frozen=vision: expects a list; write 'model.frozen=[vision]'",
    "optim.lr_by_module=3": "optim.lr_by_module=3: expects names with values; write +optim.lr_by_module.NAME=3",
    "+optim.lr_by_module.vision=fast": "optim.lr_by_module.vision=fast: expects a number",
    "optim.lr_by_module.vision=1e-7": "optim.lr_by_module.vision=1e-7: a new name ...; write +optim.lr_by_module.vision=VALUE",
    "task.data=mine.jsonl": "task.data=mine.jsonl: is a group of settings; set one of task.data.train, task.data.eval, ...",
    "optim.lr=1,2": "optim.lr=1,2: expects a number",
    "model.frozen=vision,merger": "model.frozen=vision,merger: contains a comma; write 'model.frozen=[vision,merger]'; ...",
    "task.data.train=[/bär/q.jsonl]": "...contains a special character...: 'task.data.train=[\"/bär/q.jsonl\"]'",
    'task.data.train="[/bär/q.jsonl]"': "...: expects a list; write 'task.data.train=[\"/bär/q.jsonl\"]'",
    "task.data.train=[a, b]": "task.data.train=[a,: the brackets [] are not closed; put the whole ...: 'task.data.train=[a,b]'",
    "model.path=my folder": "folder: is not key=value; ...: 'model.path=my folder', if it belongs to the argument before it",
    "optim.lr=${nope}": "optim.lr=${nope}: Interpolation key 'nope' not found",
    "experiment=wrong": "experiment/wrong.yaml: optim.lr=fast: expects a number",
    # config files that do not exist or are invalid
    "experiment=numberline_grpo": f"experiment=numberline_grpo: no such experiment; did you mean numberline_grpo_cpu...{LISTS_ALL}",
    "experimant=numberline_grpo_cpu": "experimant=numberline_grpo_cpu: no such key; did you mean experiment?",
    "judg=text": "judg=text: no such key; did you mean judge?",
    "judge=txt": f"judge=txt: no such judge; did you mean text? {LISTS_ALL}",
    "algo=gpo": f"algo=gpo: no such algo; did you mean ...grpo...? {LISTS_ALL}",
    "task=chess": f"task=chess: no such task; {LISTS_ALL}",
    "experiment=broken": "{tmp}/configs/experiment/broken.yaml: line 4 is not valid YAML: expected ',' or ']', but got ':'",
    "--config-name=mine": "--config-name=mine: no such YAML file; train is built in, ...",
    "--config-dir=/nowhere": "--config-dir: Additional config directory '/nowhere' not found",
    # a word that cannot be read
    "groupsize": "groupsize: is not key=value; put a value with blanks, brackets or quotes into shell quotes: '...groupsize'...",
    "task.data.train=[a": "task.data.train=[a: the brackets [] are not closed; put the whole argument into shell quotes: ...",
    "task.data.train='a": "task.data.train='a: the quotes are not closed; put the whole argument into shell quotes: ...",
    "model.path=a=b": "model.path=a=b: contains a special character; quote the value, and quote it again for the shell: ...",
    "--stpes=3": "unrecognized arguments: --stpes=3; see --help for the usage",
    "--model.path 3b --learning_rate=1e-4": "unrecognized arguments: ...; write model.path=3b optim.lr=1e-4",
    "--xyzzy": "unrecognized arguments: --xyzzy; see --help for the usage",
    "task=vqa stage=sft task.data.eval=[{tmp}/good.jsonl] run.dir={tmp}/begun": (  # a stage looks at its demonstrations when it begins
        "task.data.train=[]: set the question files (docs/data.md)"
    ),
    "task=vqa stage=sft task.data.eval=[{tmp}/good.jsonl] run.dir={tmp}/begun sft.splits=[correct]": (
        "sft.splits=correct: this task supports only transcript files: "
        "'sft.splits=[transcripts]' 'sft.steps=[N]' 'task.data.demonstrations=[FILE.jsonl]'"
    ),
    "task=vqa task.data.eval=[{tmp}/good.jsonl] task.data.train=[nowhere.jsonl]": (
        "task.data.train=nowhere.jsonl: no such file (looked at {tmp}/nowhere.jsonl)"
    ),
    "--help optm": "--help=optm: no key or description contains it; did you mean optim?",
    "--help xyzzy": "--help=xyzzy: no key or description contains it; use all, or one of stage, model, ...",
    "--config nowhere.yaml": "--config=nowhere.yaml: no such file (looked in ...)",
    "--config": "--config: needs the path of a YAML file",
    "--cfg dif": "argument --cfg/-c: invalid choice: 'dif' (choose from 'job', 'hydra', 'all', 'diff'); see --help for the usage",
    "task=gymnasium": "task.options.id=: is empty; choose an environment, e.g. task.options.id=MiniGrid-DoorKey-5x5-v0",
    "task=gymnasium task.options.id=Walk-v9": "task.options.id=Walk-v9: not registered; name its module: my_module:MyEnv-v0",
    "task=sokoban task.options.history=9": (
        "engine.max_images=8: must be at least task.options.history=9, the number of images in a prompt"
    ),
    "task=sokoban task.options.reply=json": "task.options.actions_per_turn=3: needs task.options.reply=tags; a JSON object has one action",
    # tools of MCP servers
    "task=visual_python task.tools.mcp=[{name:a,command:[python]}]": (
        "task.tool_format=pyvision: does not support the tools of task.tools.mcp; use task.tool_format=functions"
    ),
    "task.tools.mcp=[{name:a,command:[python]}]": "task.tools.mcp=['a']: requires task=visual_python; remove this setting",
    "task.tools.mcp=[{command:[python]}]": "task.tools.mcp=['python']: has no name; add name: NAME",
    "task.tools.mcp=[{name:a}]": "task.tools.mcp[a]={'command': [], 'url': ''}: needs either command, the program of ..., or url, ...",
    "task.tools.mcp=[{name:a,comand:[python]}]": (
        "task.tools.mcp=[{name:a,comand:[python]}]: comand is not one of the keys name, command, url, token_file, env, tools"
    ),
    "task.tools.mcp=[{name:a,command:python}]": ("task.tools.mcp=[{name:a,command:python}]: command expects a list; write command:[...]"),
    "task.tools.mcp=[{name:[a]}]": "task.tools.mcp=[{name:[a]}]: name expects text",
    "task.tools.mcp=[a]": "task.tools.mcp=[a]: contains an entry that is not a group {KEY:VALUE,...} of the keys name, command, url, ...",
    "task.tools.mcp=a": "task.tools.mcp=a: expects a list; write 'task.tools.mcp=[a]'",
    "task.tools.call_timeout_s=0": "task.tools.call_timeout_s=0.0: must be a positive, finite number of seconds",
    # a value that is out of bounds
    "optim.lr=-1": "optim.lr=-1.0: must be a finite, non-negative number",
    "optim.lr=nan": "optim.lr=nan: must be a finite, non-negative number",
    "optim.lr=inf": "optim.lr=inf: must be a finite, non-negative number",
    "algo.kl_coef=inf": "algo.kl_coef=inf: must be a finite, non-negative number",
    "algo.kl_target=0.02": "algo.kl_target=0.02: requires a positive algo.kl_coef as the initial coefficient",
    "algo.kl_target=nan algo.kl_coef=0.1": "algo.kl_target=nan: must be a finite, non-negative number",
    "algo.kl_target=0.02 algo.kl_coef=0.1 algo.kl_horizon=9": "algo.kl_horizon=9: must be at least ..., the maximum number of episodes ...",
    "algo.clip_ratio_low=2": "algo.clip_ratio_low=2.0: must be in [0, 1]",
    "algo.temperature=0": "algo.temperature=0.0: must be in [0.01, 2]: vLLM changes or rejects other values",
    "batch.prompts_per_step=0": "batch.prompts_per_step=0: must be at least 1",
    "batch.group_size=1": "batch.group_size=1: must be at least 2: a group with one rollout has no baseline",
    "critic.backbone=owns": "critic.backbone=owns: choose one of shared, own",
    "critic.path=there": "critic.path=there: requires a critic with its own backbone; set critic.backbone=own",
    "critic.lr=1e-3": "critic.lr=0.001: algo.name=grpo has no critic; choose algo=ppo, or leave it out",
    "algo=ppo critic.lora.rank=4": "critic.lora.rank=4: requires a critic with its own backbone; ... use lora.rank for a shared backbone",
    "algo=ppo critic.head_sizes=[8,0]": "critic.head_sizes=[8, 0]: must be positive numbers",
    "algo=ppo critic.warmup_steps=1 optim.weight_decay=0.1": "optim.weight_decay=0.1: would change the shared backbone while ...",
    "algo=ppo run.steps=3 critic.warmup_steps=3": "critic.warmup_steps=3: leaves no training steps for the policy (run.steps=3)",
    "algo=ppo critic.lr=1e-4 optim.lr=1e-3 optim.min_lr=5e-4": "critic.lr=0.0001: must be at least optim.min_lr=0.0005",
    "algo=ppo algo.turn_credit=return_to_go": "algo.turn_credit=return_to_go: algo.name=ppo assigns one advantage per episode; use ...",
    "algo=ppo filter.drop=[zero_std]": "filter.drop=['zero_std']: algo.name=ppo also learns from groups with equal rewards; ...",
    "algo.bootstrap_truncated=true": "algo.bootstrap_truncated=True: algo.name=grpo has no critic; use ppo, or set it to false",
    "algo.gae_level=words": "algo.gae_level=words: choose one of tokens, turns",
    "algo.thought_logprob_scale=2": "algo.thought_logprob_scale=2.0: must be in [0, 1]",
    "batch.prompts_per_step=5 batch.minibatches=2": "batch.prompts_per_step=5: must be divisible by batch.minibatches=2: ...",
    "run.steps=0": "run.steps=0: must be at least 1",
    "evaluation.split=test": "evaluation.split=test: choose one of eval, train",
    "evaluation.samples=0": "evaluation.samples=0: must be at least 1",
    "evaluation.samples=4": "evaluation.samples=4: all greedy episodes of an example are equal; raise evaluation.temperature, or use 1",
    "evaluation.temperature=-1": "evaluation.temperature=-1.0: must not be negative; 0 decodes greedily",
    "evaluation.chunk=0": "evaluation.chunk=0: must be at least 1",
    "model.dtype=float16": "model.dtype=float16: choose one of auto, float32, bfloat16",
    "model.max_pixels=100": "model.max_pixels=100: must be at least model.min_pixels=...",
    "model.frozen=[eyes]": "model.frozen=eyes: choose one of vision, merger, language",
    "lora.rank=4 lora.targets=[head]": "lora.targets=head: choose one of attention, mlp, vision, projector",
    "task.sandbox.size=0": "task.sandbox.size=0: must be at least 1",
    "task.sandbox.token_file=x": "task.sandbox.token_file=x: has no effect without task.sandbox.url; set the URL of the server",
    "task.judge.urls=[service:judge]": "task.judge.urls=service:judge: no such service is configured; set services.judge.kind=vllm",
    "task.judge.urls=[http://me:SECRET@judge:1/v1]": "task.judge.urls=...: contains @, ? or #; give ...",
    "task.judge.urls=http://me:SECRET@judge:1/v1": "task.judge.urls=http://***: expects a list; write 'task.judge.urls=[http://***",
    "task.sandbox.url=http://me:SECRET@box:1": "task.sandbox.url=...: contains @, ? or #; ...",
    "task.sandbox.urls=http://me:SECRET@box:1": "task.sandbox.urls=http://***: no such key; did you mean task.speaker.urls?",
    "task.judge.urls=[http://me:SECRET@judge:1/v1": "task.judge.urls=[http://***: the brackets [] are not closed; ...",
    "task.judge.urls=[http://judge:1/v1?key=SECRET]": "task.judge.urls=[http://***: contains a special character; ...",
    "services.judge={kind:vllm,model:7b,args:[--api-key,SECRET]}": "services.judge.args=...: contains --api-key, ...",
    "services.judge.kind=vlm": "services.judge.kind=vlm: choose one of vllm, sandbox, listener, speaker",
    "services.judge.model=7b": "services.judge.kind=: starts no server, but services.judge.model is set; choose vllm, sandbox, ...",
    "services.judge.kind=vllm": "services.judge.model=: is required for the kinds vllm, listener, speaker and must be empty for others",
    "services.sandbox.kind=sandbox services.sandbox.port=70000": "services.sandbox.port=70000: is not a valid port; 0 selects a free port",
    "services.sandbox.kind=sandbox services.sandbox.command=[nope]": "services.sandbox.command=['nope']: program nope not found on ...",
    "services.sandbox.kind=sandbox services.sandbox.gpus=[99]": "services.sandbox.gpus=[99]: ...GPUs, with indices from 0",
    "services.sandbox={kind:sandbox,args:[--token-file,x]}": "services.sandbox.args=['--token-file', 'x']: contains --token-file: ...",
    "services.sandbox.kind=sandbox task.sandbox.url=service:sandbox task.sandbox.token_file=x": (
        "task.sandbox.token_file=x: must be empty for a service, because ..."
    ),
    "engine.mode=server engine.num_local_servers=2 engine.urls=[http://a:1]": "engine.num_local_servers=2: cannot be combined with ...",
    "engine.num_local_servers=2": "engine.num_local_servers=2: requires engine.mode=server; set this mode, or remove this setting",
    "engine.mode=server": "engine.urls=[]: is required by engine.mode=server; set the URLs of running servers, or ...",
    "experiment=numberline_grpo_cpu engine.mode=server engine.urls=[http://127.0.0.1:1]": NOBODY.format("http://127.0.0.1:1"),
    "experiment=numberline_grpo_cpu engine.mode=server engine.urls=[{page}]": NOBODY.format("{page}"),
    "engine.mode=server engine.num_local_servers=2 engine.startup_timeout_s=0": "engine.startup_timeout_s=0.0: must be a ... seconds",
    "wandb.mode=onlin": "wandb.mode=onlin: choose one of disabled, offline, online",
    "trackio.mode=online": "trackio.mode=online: choose one of disabled, local",
    "stage=rll": "stage=rll: choose one of rl, sft",
    # what does not fit the model, the machine or the number of processes
    "engine.max_model_len=100000": "engine.max_model_len=100000: the model supports at most 4096 (max_position_embeddings)",
    "engine.device=cuda": "engine.device=cuda: this machine has no usable GPU; use engine.device=auto",
    "parallel.tp=3": "parallel.tp=3: does not divide the model's 4 attention heads; use one of 1, 2",
    "parallel.tp=2": "parallel.tp*parallel.pp=2: must divide the number of processes (1); set torchrun's --nproc_per_node...",
    "engine.tp=2": "engine.tp=2: must divide the number of processes (1)",
    "wandb.mode=online": "wandb.mode=online: no API key: run wandb login, or set WANDB_API_KEY, or use offline...",
    # a model, a task, data, a folder that do not exist, or are none
    "run.steps=3 run.epochs=1": "run.epochs=1: run.steps=3 is given, too; remove one of them",
    "run.epochs=-1": "run.epochs=-1.0: must be a finite, non-negative number; 0 uses run.steps",
    "model.path=???": "model.path=???: has no default; set it on the command line",
    "model.path={tmp}/nowhere": "model.path={tmp}/nowhere: no such folder (looked in {tmp}/nowhere); use a Hugging Face model folder",
    "model.path={tmp}": "model.path={tmp}: config.json is missing (looked in {tmp}); use a Hugging Face model folder",
    "model.path=Qwen/Qwen2.5-VL-3B-Instruct": (
        "model.path=Qwen/Qwen2.5-VL-3B-Instruct: no such folder (looked in {tmp}/Qwen/Qwen2.5-VL-3B-Instruct); "
        "the Hugging Face cache has no such model either; download it: hf download Qwen/Qwen2.5-VL-3B-Instruct"
    ),
    "experiment=numberline_grpo_cpu model.path=runs/quickstart/sft/final": (
        "model.path=runs/quickstart/sft/final: no such folder (looked in {tmp}/runs/quickstart/sft/final); ...; "
        "create the folder with bash launch/quickstart.sh, or with python launch/train.py stage=sft experiment=numberline_sft_cpu"
    ),
    "model.path={tmp}/other_model": "model.path={tmp}/other_model: config.json has model_type internvl; supported: ...qwen2_5_vl...",
    "model.path={tmp}/no_tokenizer": "model.path={tmp}/no_tokenizer: tokenizer.json is missing; copy it from the original model",
    "model.path={tmp}/half": "model.path={tmp}/half: ...model.safetensors...corrupt...copy it again...",
    "model.path={tmp}/bad_header": "model.path={tmp}/bad_header: ...model.safetensors...corrupt...copy it again...",
    "algo=ppo critic.backbone=own critic.path={tmp}/other_critic": "critic.path={tmp}/other_critic: has patch_size=16, the policy has ...",
    "task.name=chess": "task.name=chess: no such task; choose one of ..., blackjack, ...",
    "task=vqa": "task.data.eval=[]: set the files that contain the held-out questions",
    "task=vqa task.data.eval=[{tmp}/good.jsonl]": "task.data.train=[]: set the question files...",
    "task=vqa task.data.eval=[{tmp}/good.jsonl] task.data.train=[{tmp}/nowhere.jsonl]": "task.data.train={tmp}/nowhere.jsonl: no such file",
    "task=vqa task.data.eval=[{tmp}/good.jsonl] task.data.train=[{tmp}/table.csv]": "...table.csv: row 0 has 3 fields...",
    "task=vqa task.data.eval=[{tmp}/good.jsonl] task.data.train=[{tmp}/half.jsonl]": "...half.jsonl row 1: is not valid JSON ...",
    "task=vqa task.data.eval=[{tmp}/true.jsonl] task.data.train=[{tmp}/good.jsonl]": "...true.jsonl row 0: answer: is true...",
    "task=vqa task.data.eval=[{tmp}/nan.jsonl] task.data.train=[{tmp}/good.jsonl]": "...nan.jsonl row 0: answer: is nan...",
    "task=vqa task.data.eval=[{tmp}/web.jsonl] task.data.train=[{tmp}/good.jsonl]": "...web.jsonl row 0: ...is a URL...",
    "task=vqa task.data.eval=[{tmp}/good.jsonl] judge=text": "task.judge.urls=[]: ...",
    "algo=cispo algo.clip_ratio_c=3": "algo.clip_ratio_c=3.0: has no effect with algo.name=cispo; leave it at 0",
    "algo=reinforce_pp filter.drop=[zero_std]": "filter.drop=['zero_std']: algo.name=reinforce_pp also learns ...; leave zero_std out",
    "run.dir={tmp}/file/run": "run.dir={tmp}/file/run: ...Not a directory...choose another folder...",
    "run.dir=/proc/run": "run.dir=/proc/run: ...choose another folder...",
}
