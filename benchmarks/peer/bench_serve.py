"""`vllm bench serve` at the rates that come on standard input, one a line: imported once, run once a rate.

    python benchmarks/peer/bench_serve.py PORT TOKENIZER SECONDS FOLDER

Each line is `NAME RATE`; the detailed result goes to `FOLDER/NAME.json`, and `done` to standard output. The `vllm`
command asks for a distribution of another name in the CPU build, so its entry point is called from Python.
"""

import contextlib
import io
import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

port, tokenizer, seconds, folder = sys.argv[1:]
print("ready", flush=True)
for line in sys.stdin:
    name, rate = line.split()
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    # Even gaps: burstiness without end, so that the moments that were meant are known.
    given = (
        f"--backend openai --base-url http://127.0.0.1:{port} --model golden --tokenizer {tokenizer} "
        f"--dataset-name random --random-input-len 32 --random-output-len 50 --ignore-eos --disable-tqdm "
        f"--num-prompts {round(float(rate) * float(seconds))} --request-rate {rate} --burstiness inf "
        f"--ready-check-timeout-sec 0 --save-result --save-detailed --result-dir {folder} --result-filename {name}.json"
    )
    with contextlib.redirect_stdout(io.StringIO()):
        main(parser.parse_args(given.split()))
    print("done", flush=True)
