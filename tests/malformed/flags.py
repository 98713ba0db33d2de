"""Malformed command lines: flags, and the files that they name."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

from tests.malformed.cases import Case, World

_LINE = b'{"prompt": "p"}\n'
_WORKLOAD = '{"question_id": 1, "category": "c", "turns": ["t"]}\n'
_WHOLE = gzip.compress(_LINE * 50)

FILES: dict[str, bytes] = {
    "a.csv": b"x",
    "weights.bin": b"\x80\x04.",
    "model.safetensors": b"",
    "nothing.gguf": b"",
    "text.gguf": b"no model at all",
    "good.jsonl": _LINE,
    "empty.txt": b"\n \n",
    "empty.jsonl": b"\n \n",
    "latin.txt": b"Gr\xfc\xdfe\n",
    "latin.jsonl": b'{"prompt": "\xfc"}\n',
    "latin.flags": b"--prompt=\xfc\n",
    "bad.flags": b"--gamma=many\n",
    "unknown.flags": b"--nonsense=1\n",
    "open.jsonl": b'{"prompt": "fine"}\n{"prompt": \n',
    "deep.jsonl": b"[" * 100_000,
    "list.jsonl": b"[1]\n",
    "number.jsonl": b'{"prompt": 3}\n',
    "none.jsonl": b'{"text": "p"}\n',
    "both.jsonl": b'{"prompt": "p", "messages": []}\n',
    "blank.jsonl": b'{"prompt": ""}\n',
    "turn.jsonl": b'{"messages": [{"role": "user", "content": 3}]}\n',
    "half.jsonl": b'{"prompt": "\\ud800"}\n',
    "twice.jsonl": b'{"prompt": "p", "id": 1}\n{"prompt": "q", "id": 1}\n',
    "cut.jsonl.gz": _WHOLE[:-12],
    "false.jsonl.gz": _LINE,
    "damaged.jsonl.gz": _WHOLE[:14] + b"\xff\xff\xff" + _WHOLE[17:],
    "w-open.jsonl": b'{"question_id": 1\n',
    "w-list.jsonl": b"[]\n",
    "w-deep.jsonl": b"[" * 100_000,
    "w-missing.jsonl": b'{"question_id": 1, "turns": ["t"]}\n',
    "w-none.jsonl": b'{"question_id": 1, "category": "c", "turns": []}\n',
    "w-text.jsonl": b'{"question_id": 1, "category": "c", "turns": "text"}\n',
    "w-number.jsonl": b'{"question_id": 1, "category": "c", "turns": [3]}\n',
    "w-good.jsonl": _WORKLOAD.encode(),
}
FOLDERS = ("folder", "folder.txt", "folder.jsonl", "folder.gguf")

_EXIT = "--drafter=early-exit --exit_layers=1"

# What is added to --experiment=generate --prompt=hi; field and value; the remedy.
_GENERATE: list[tuple[str, str, str]] = [
    ("--gamma=1e3", "gamma='1e3'", "give an integer"),
    ("--gamma=True", "gamma='True'", "give an integer"),
    ("--gamma=99999999999999999999", "gamma=99999999999999999999", "up to 127"),
    ("--gamma= --seed=1", "gamma=''", "give an integer"),
    ("--temperature=", "temperature=''", "give a number"),
    ("--temperature=inf", "temperature=inf", "0 for greedy"),
    ("--temperature=1e400", "temperature=inf", "0 for greedy"),
    ("--temperature=1e38", "temperature=1e+38", "0 for greedy"),
    ("--temperature=-1", "temperature=-1.0", "0 for greedy"),
    ("--top_k=1.5", "top_k='1.5'", "give an integer"),
    ("--top_k=-2", "top_k=-2", "give 0"),
    ("--top_p=nan", "top_p=nan", "give a number"),
    ("--top_p=-1", "top_p=-1.0", "give 1"),
    ("--min_p=nan", "min_p=nan", "give a number"),
    ("--min_p=-0.1", "min_p=-0.1", "give 0"),
    ("--repetition_penalty=0", "repetition_penalty=0.0", "give 1 for none"),
    ("--repetition_penalty=101", "repetition_penalty=101.0", "give 1 for none"),
    ("--repetition_penalty=nan", "repetition_penalty=nan", "give a number"),
    ("--frequency_penalty=2.5", "frequency_penalty=2.5", "give 0"),
    ("--presence_penalty=-3", "presence_penalty=-3.0", "give 0"),
    ("--presence_penalty=much", "presence_penalty='much'", "give a number"),
    ("--logit_bias=5", "logit_bias='5'", "--logit_bias=12:1.5"),
    ("--logit_bias=5:x", "logit_bias='5:x'", "--logit_bias=12:1.5"),
    ("--logit_bias=5:1:2", "logit_bias='5:1:2'", "--logit_bias=12:1.5"),
    ("--logit_bias=-1:1", "logit_bias=-1", "ids of the vocabulary"),
    ("--logit_bias=5:nan", "logit_bias=nan", "give a number"),
    ("--logit_bias=5:20000", "logit_bias=20000.0", "use bad_words"),
    ("--logit_bias=5:1,5:2", "logit_bias=5", "once"),
    ("--logit_bias=999:1", "prompt[0].logit_bias=999", "ids of the target's tokenizer"),
    ("--bad_word=", "bad_words=''", "give texts"),
    ("--bad_word=\udcff", "bad_words='\\udcff'", "remove lone surrogates"),
    ("--stop=", "stop=''", "at least one character"),
    ("--stop=\udcff", "stop='\\udcff'", "remove lone surrogates"),
    ("--seed=x", "seed='x'", "give an integer"),
    ("--seed=-1", "seed=-1", "[0, 2**64)"),
    ("--seed=18446744073709551616", "seed=18446744073709551616", "[0, 2**64)"),
    ("--max_new_tokens=0.5", "max_new_tokens='0.5'", "give an integer"),
    ("--max_new_tokens=-1", "max_new_tokens=-1", "at least one token"),
    ("--min_new_tokens=-1", "min_new_tokens=-1", "give 0"),
    ("--min_new_tokens=500", "min_new_tokens=500", "raise max_new_tokens"),
    ("--stop_token_ids=1.5", "stop_token_ids='1.5'", "separated by commas"),
    ("--stop_token_ids=1,,2", "stop_token_ids='1,,2'", "separated by commas"),
    ("--ignore_eos=2", "ignore_eos='2'", "--noignore_eos"),
    ("--raw=sometimes", "raw='sometimes'", "--noraw"),
    ("--profile=perhaps", "profile='perhaps'", "--noprofile"),
    ("--logprobs=-1", "logprobs=-1", "ask for fewer"),
    ("--logprobs=129", "logprobs=129", "ask for fewer"),
    ("--prompt_logprobs=all", "prompt_logprobs='all'", "give an integer"),
    ("--n=0", "n=0", "at least one sample"),
    ("--n=3", "n=3", "temperature above 0"),
    ("--n=100000 --temperature=1", "n=100000", "over several requests"),
    ("--batch_size=-1", "batch_size=-1", "at least one row"),
    ("--batch_size=two", "batch_size='two'", "give an integer"),
    ("--rounds_per_chunk=0.5", "rounds_per_chunk='0.5'", "give an integer"),
    ("--verification=", "verification=''", "token, block"),
    ("--dtype=float64", "dtype='float64'", "float32, bfloat16, float16"),
    ("--weights=int4", "weights='int4'", "same, int8"),
    ("--num_beams=4", "num_beams='4'", "leave it out"),
    ("--use_beam_search", "use_beam_search=", "leave it out"),
    ("--guided_json={}", "guided_json='{}'", "leave it out"),
    ("--max_tokens=5", "flag='--max_tokens'", "did you mean --max_new_tokens"),
    ("--num_return_sequences=5", "flag='--num_return_sequences'", "did you mean --n"),
    ("--temprature=1", "flag='--temprature'", "did you mean --temperature"),
    ("--nogamma", "flag='--nogamma'", "did you mean --gamma"),
    ("--prompt", "flag='--prompt'", "give --prompt=VALUE"),
    ("hello", "argument='hello'", "--name=value"),
    ("batch", "argument='batch'", "--experiment=batch"),
    ("--drafter=NGRAM", "drafter='NGRAM'", "none, ngram, trained, draft-model, early-exit"),
    ("--drafter=none --gamma=4", "gamma=4", "leave it out"),
    ("--drafter=trained", "trained names no drafter", "give eagle, medusa, draft"),
    ("--drafter=trained --trained=no/t/here", "trained='no/t/here'", "give eagle, medusa, draft"),
    ("--drafter=trained --trained=.", "path='config.json'", "fetch the checkpoint again"),
    ("--drafter=trained --trained=. --ngram_max=4", "ngram_max=4", "--drafter=ngram"),
    ("--trained=medusa", "trained='medusa'", "--drafter=trained"),
    ("--lookup", "lookup=True", "--drafter=trained"),
    ("--drafter=draft-model --draft_model=", "draft_model=''", "a smaller model"),
    ("--drafter=draft-model --draft_model=no/t/here", "draft_model='no/t/here'", "give a path"),
    ("--drafter=early-exit --exit_layers=2", "exit_layers=2", "fewer layers"),
    ("--drafter=early-exit --exit_layers=-1", "exit_layers=-1", "at least 1"),
    ("--draft_model=x", "draft_model='x'", "--drafter=draft-model"),
    ("--ngram_min=4", "ngram_max=3", "ngram_max >= ngram_min"),
    ("--ngram_max=1000", "ngram_max=1000", "shorter suffixes"),
    ("--ngram_min=1.5", "ngram_min='1.5'", "give an integer"),
    ("--drafter=none --tree=2", "tree='2'", "leave it out, or choose a drafter"),
    ("--tree=3,2,1", "tree='3,2,1'", "give --tree=dynamic"),
    (f"{_EXIT} --tree=", "tree=''", "give branching by level"),
    (f"{_EXIT} --tree=bush", "tree='bush'", "give branching by level"),
    (f"{_EXIT} --tree=2,0", "tree='2,0'", "give counts >= 1"),
    (f"{_EXIT} --tree=9,9,9", "tree='9,9,9'", "draft 1 to 127"),
    (f"{_EXIT} --tree={'9,' * 5000}9", "tree='9,9,", "draft 1 to 127"),
    (f"{_EXIT} --tree=parents:-1", "tree='parents:-1'", "draft 1 to 127"),
    (f"{_EXIT} --tree=parents:-1,0,2", "tree='parents:-1,0,2'", "give -1, then"),
    (f"{_EXIT} --tree=parents:0,0", "tree='parents:0,0'", "give -1, then"),
    (f"{_EXIT} --tree=optimal", "tree='optimal'", "run --experiment=tree"),
    (f"{_EXIT} --tree=2 --gamma=3", "gamma=3", "leave it out"),
    ("--tree=dynamic --gamma=0", "gamma=0", "leave it out"),
    (f"{_EXIT} --tree=2 --verification=block", "verification='block'", "use token"),
    (f"{_EXIT} --tree=2 --tree_width=3", "tree_width=3", "give --tree=dynamic"),
    (f"{_EXIT} --tree_nodes=3", "tree_nodes=3", "give --tree=dynamic"),
    (f"{_EXIT} --tree=dynamic --tree_nodes=9 --tree_width=1", "tree_nodes=9", "give fewer nodes"),
    (f"{_EXIT} --tree=dynamic --draws=independent", "draws='independent'", "fixed shape"),
    (f"{_EXIT} --draws=top-k", "draws='top-k'", "or give --tree"),
    ("--tree_nodes=128", "tree_nodes=128", "give a count in it"),
    ("--tree_nodes=two", "tree_nodes='two'", "give an integer"),
    ("--tree_width=65 --tree_nodes=3", "tree_width=65", "look at fewer"),
    ("--tree=dynamic --tree_depth=2", "tree_depth=2", "give --drafter=trained"),
    ("--tree=dynamic --draws=top-k", "draws='top-k'", "give --drafter=trained"),
    ("--draws=best", "draws='best'", "without-replacement, independent, top-k"),
    ("--model=", "model=''", "give a path"),
    ("--model=no/t/here", "model='no/t/here'", "give a path"),
    ("--model=~nobody-at-all/m", "model='~nobody-at-all/m'", "check it"),
    (f"--model={'m' * 300}", f"model='{'m' * 100}", "check it"),
    ("--model=a.csv", "model='a.csv'", "give a .gguf file"),
    ("--model=folder", "model='folder'", "give a directory"),
    ("--model=folder.gguf", "model='folder.gguf'", "give a directory"),
    ("--model=weights.bin", "model='weights.bin'", "convert it to safetensors"),
    ("--model=model.safetensors", "model='model.safetensors'", "give its directory"),
    ("--model=nothing.gguf", "model='nothing.gguf'", "give a .gguf file"),
    ("--model=text.gguf", "model='text.gguf'", "give a .gguf file"),
    ("--model=/dev/null", "model='/dev/null'", "give one"),
    ("--output=a.csv", "output='a.csv'", "another --output"),
    ("--output=~nobody-at-all/x", "output='~nobody-at-all/x'", "check the path"),
    ("--compilation_cache=a.csv", "compilation_cache='a.csv'", "another folder"),
    ("--compilation_cache=~nobody-at-all", "compilation_cache='~nobody-", "check the path"),
    ("--flagfile=no.flags", "flagfile='no.flags'", "check the path"),
    ("--flagfile=folder", "flagfile='folder'", "check the path"),
    ("--flagfile=latin.flags", "flagfile=b'--prompt=\\xfc\\n'", "save it as UTF-8"),
    ("--flagfile=bad.flags", "gamma='many'", "give an integer"),
    ("--flagfile=unknown.flags", "flag='--nonsense'", "see --help"),
    ("--prompt=", "prompt[1]=''", "give some text"),
    ("--prompt=\udcff", "prompt[1]='user: \\udcff", "remove lone surrogates"),
    ("--input=no.txt", "input='no.txt'", "check the path"),
    ("--input=~nobody-at-all/p.txt", "input='~nobody-at-all/p.txt'", "check the path"),
    ("--input=folder.txt", "input='folder.txt'", "check the path"),
    ("--input=good.jsonl.gz", "input='good.jsonl.gz'", ".txt file"),
    ("--input=latin.txt", "input='latin.txt'", "save it as UTF-8"),
    ("--input=latin.jsonl", "input='latin.jsonl'", "save it as UTF-8"),
    ("--input=open.jsonl", "open.jsonl:2='{\"prompt\": '", "give {"),
    ("--input=deep.jsonl", "deep.jsonl:1='[[[[", "give {"),
    ("--input=list.jsonl", "list.jsonl:1='[1]'", "give {"),
    ("--input=none.jsonl", 'none.jsonl:1=\'{"text": "p"}\'', "give {"),
    ("--input=both.jsonl", "both.jsonl:1='{", "give {"),
    ("--input=number.jsonl", "number.jsonl:1=3", "give a string"),
    ("--input=blank.jsonl", "blank.jsonl:1=''", "give some text"),
    ("--input=turn.jsonl", "turn.jsonl:1=[{", "both strings"),
    ("--input=half.jsonl", "half.jsonl:1='user: \\ud800", "remove lone surrogates"),
]

# Whole command lines but for --model.
_OTHERS: list[tuple[str, str, str]] = [
    ("", "experiment ", "give one of"),
    ("--experiment=", "experiment=''", "give one of"),
    ("--experiment=Batch", "experiment='Batch'", "give one of"),
    ("--experiment=generate", "prompt ", "--prompt=TEXT"),
    ("--experiment=generate --input=empty.txt", "input='empty.txt'", "at least one"),
    ("--experiment=generate --prompt=p --repeats=3", "repeats=3", "leave it out"),
    ("--experiment=demo --verification=typical", "verification='typical'", "use token or block"),
    ("--experiment=demo --batch_size=2", "batch_size=2", "leave it out"),
    ("--experiment=demo --input=good.jsonl", "input=['good.jsonl']", "leave it out"),
    ("--experiment=batch --output=j", "input ", "--input=FILE.jsonl"),
    ("--experiment=batch --input=good.jsonl", "output ", "--output=FOLDER"),
    ("--experiment=batch --prompt=p --output=j", "prompt=['p']", "leave it out"),
    *(
        (f"--experiment=batch --output=j --input={name}", f"input='{name}'", remedy)
        for name, remedy in (
            ("no.jsonl", "check the file"),
            ("a.csv", "JSON object a line"),
            ("folder.jsonl", "check the path"),
            ("empty.jsonl", "JSON object a line"),
            ("cut.jsonl.gz", "check the file"),
            ("false.jsonl.gz", "check the file"),
            ("damaged.jsonl.gz", "check the file"),
            ("~nobody-at-all/p.jsonl", "check the path"),
        )
    ),
    (
        "--experiment=batch --output=j --input=good.jsonl --input=./good.jsonl",
        "input='good.jsonl'",
        "every file once",
    ),
    ("--experiment=batch --output=j --input=twice.jsonl", "id=1", "an id of its own"),
    (
        "--experiment=batch --output=a.csv --input=good.jsonl",
        "output='a.csv",
        "give another --output",
    ),
    (
        "--experiment=batch --output=j --input=good.jsonl --retry_failed=never",
        "retry_failed='never'",
        "--noretry_failed",
    ),
    ("--experiment=tree", "tree ", "as --tree=3,2,1"),
    ("--experiment=tree --tree=optimal", "tree='optimal'", "or --rates"),
    ("--experiment=tree --tree=dynamic --rates=0.5", "tree='dynamic'", "--prompt=TEXT"),
    ("--experiment=tree --tree=2 --rates=0.9,0.2", "rates='0.9,0.2'", "exclude each other"),
    ("--experiment=tree --tree=2 --rates=high", "rates='high'", "separate numbers by commas"),
    ("--experiment=tree --tree=2 --drafter=ngram", "drafter='ngram'", "leave it out, or give"),
    ("--experiment=tree --tree=2 --gamma=2", "gamma=2", "leave it out"),
    ("--experiment=tree --prompt=p --drafter=none", "drafter='none'", "give --drafter=ngram"),
    (f"--experiment=tree --prompt=p {_EXIT}", "tree ", "give --tree=optimal"),
    ("--experiment=tree --prompt=p --rates=0.5", "rates='0.5'", "leave them out"),
    ("--experiment=tree --prompt=p --temperatures=x", "temperatures='x'", "separate numbers"),
    ("--experiment=tree --prompt=p --temperatures=-1", "temperature=-1.0", "0 for greedy"),
    ("--experiment=tree --prompt=p --sizes=3", "sizes='3'", "leave it out"),
    ("--experiment=tree --tree=3 --rates=0.6,0.2", "rates='0.6,0.2'", "give 3 rates"),
    ("--experiment=tree --tree=2 --rates=0.1,0.6", "rates='0.1,0.6'", "most probable child first"),
    ("--experiment=tree --tree=3,2,1 --top_p=0.5", "top_p=0.5", "leave it out"),
    ("--experiment=tree --prompt=p --sizes=0", "sizes='0'", "counts from 1 to 127"),
    (
        "--experiment=tree --prompt=p --workloads=w-good.jsonl",
        "workloads='w-good.jsonl'",
        "give either",
    ),
    ("--experiment=tree --workloads=no.jsonl", "workloads='no.jsonl'", "give a JSON-lines file"),
    ("--experiment=bench", "workloads ", "give a JSON-lines file"),
    ("--experiment=bench --workloads=no.jsonl", "workloads='no.jsonl'", "give a JSON-lines file"),
    ("--experiment=bench --workloads=folder", "workloads='folder'", "give a JSON-lines file"),
    ("--experiment=bench --workloads=latin.txt", "workloads='latin.txt'", "give a JSON-lines"),
    ("--experiment=bench --workloads=empty.txt", "workloads='empty.txt'", "give a JSON-lines"),
    *(
        (f"--experiment=bench --workloads=w-{name}.jsonl", "workloads line 1='", "give question_id")
        for name in ("open", "list", "deep", "missing", "none", "text", "number")
    ),
    *(
        (f"--experiment=bench --workloads=w-good.jsonl {flag}", begins, remedy)
        for flag, begins, remedy in (
            ("--per_category=-1", "per_category=-1", "give 0 for all"),
            ("--rows=0", "rows='0'", "give counts >= 1"),
            ("--rows=1,x", "rows='1,x'", "separate integers by commas"),
            ("--batches=", "batches=''", "give counts >= 1"),
            ("--repeats=0", "repeats=0", "give a count >= 1"),
            ("--throughput_batches=1.5", "throughput_batches='1.5'", "separate integers"),
            ("--throughput_tokens=-1", "throughput_tokens=-1", "give a count >= 1"),
            ("--gamma=0", "drafter='ngram'", "gamma >= 1"),
            ("--batch_size=4", "batch_size=4", "leave it out"),
        )
    ),
]


def write_files(folder: Path) -> None:
    """Write what the command lines name."""
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    for name in FOLDERS:
        (folder / name).mkdir()


def _command(arguments: list[str]) -> Callable[[World], str]:
    def sentence(world: World) -> str:
        return world.command(arguments)

    return sentence


def cases() -> list[Case]:
    """Return the table."""
    lines = [(f"--experiment=generate --prompt=hi {flag}", *rest) for flag, *rest in _GENERATE]
    return [
        Case(
            f"flags {line.replace('--experiment=generate --prompt=hi ', '')}"[:70],
            _command(line.split(" ") if line else []),
            f"error: {begins}",
            remedy,
        )
        for line, begins, remedy in [*lines, *_OTHERS]
    ]
