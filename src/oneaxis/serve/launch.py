"""Entry of the vLLM server process on a CPU: the same server as `vllm serve`, with its engine core forked.

vLLM starts the engine core with `spawn` on a CPU, because its multi-process executor needs another OMP environment in
each worker. With the one-process executor (`--distributed-executor-backend uni`) that reason is gone, and a second
import of torch, transformers and vLLM (about ten seconds) is all that `spawn` gives. `fork` is vLLM's own default for
other devices; here it happens before any OpenMP region has run in the parent.

The engine core asks the kernel to die with the API server. Run as a script, so that nothing of oneaxis is imported.
"""

import ctypes
import multiprocessing
import os
import signal

PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def preload() -> None:
    """Import what the API server and its engine core import, and let vLLM read its own options once."""
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.entrypoints.launchers.api_server.entry import main  # noqa: F401
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    make_arg_parser(FlexibleArgumentParser())


def main() -> None:
    """Run vLLM's OpenAI server with the arguments of this process."""
    import vllm.v1.engine.utils as engine_utils
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    os.register_at_fork(after_in_child=_die_with_parent)
    engine_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    serve()


if __name__ == "__main__":
    main()
