"""`python -m conformance.hostile`: the interpreter that `engine_runs.run_engine` starts."""

from conformance.hostile.engine_runs import serve

serve()
