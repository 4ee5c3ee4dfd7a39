# before: print(insight.why())
import pathlib

import telegrad
import telegrad.insight

workers = telegrad.local(2)
trace, dashboard = telegrad.insight.trace, telegrad.insight.dashboard
telegrad.insight.trace = lambda path, seconds: trace(path, 0.1)
telegrad.insight.dashboard = lambda port: dashboard(port=0)  # that one may be in use

# after: print(insight.why())
assert pathlib.Path("trace.json").stat().st_size > 100
shown.close()
