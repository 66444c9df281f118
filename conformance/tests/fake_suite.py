"""`python -m conformance.tests.fake_suite FOLDER ARGUMENTS...`: the command line with FOLDER's fake of llama.cpp.

Everything else is as it is: the engine runs in a process of its own, records are written, tables are printed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from conformance import __main__


def main() -> int:
    try:
        put_in_place(Path(sys.argv[1]))
    except KeyboardInterrupt:  # while it is imported, of which the command line itself takes care
        print("error: interrupted", file=sys.stderr)
        return 130
    sys.argv[1:] = sys.argv[2:]
    return __main__.main()


def put_in_place(folder: Path) -> None:
    from baselines.llama_cpp.build import LlamaBuild
    from conformance import cli
    from conformance.bench import commands
    from conformance.llama_builds import LlamaCpp
    from conformance.scenario import find_scenario

    tools = folder / "bin"
    llama = LlamaCpp(LlamaBuild(folder, tools, 8763, {}, (), "cc 1.0", folder / "log", tool_folders=(tools,)))
    builds = SimpleNamespace(open=lambda device: llama)
    for module in (cli, commands):
        module.LlamaBuilds = lambda options, architectures, progress: builds  # type: ignore[attr-defined]
    # without the scenario that runs the controls, which is added to any: a run is to take a second
    cli.select_scenarios = lambda names: [find_scenario(name) for name in names]  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
