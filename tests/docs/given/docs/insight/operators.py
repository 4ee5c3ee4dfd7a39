# before: serve_metrics(9100)
import telegrad
import telegrad.insight.prometheus

workers = telegrad.local(1)
serve = telegrad.insight.prometheus.serve_metrics
telegrad.insight.prometheus.serve_metrics = lambda port: serve(0)  # that one may be in use

# after: serve_metrics(9100)
assert served.port
served.close()

# at the end
registered.close()
opentelemetry.uninstrument()
provider.shutdown()
