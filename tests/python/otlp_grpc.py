"""An OTLP receiver over gRPC, made of the official packages: says `PORT` and then a line of JSON per call.

Arguments: the directory for what comes (N.metrics, N.profiles, gzipped), what is answered, comma-separated (then `ok` for ever; a
word with `*` for ever), the largest message, and, for TLS, certificate chain and key.
"""

import concurrent.futures
import gzip
import json
import sys
import threading

import grpc
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as profiles

directory, plan, limit, *tls = sys.argv[1:]
plan = plan.split(",")
lock = threading.Lock()
calls = 0

# ExportMetricsPartialSuccess and ExportProfilesPartialSuccess call it differently.
KINDS = {
    "metrics": (metrics, "MetricsService", metrics.ExportMetricsServiceRequest, metrics.ExportMetricsServiceResponse, "rejected_data_points"),
    "profiles": (profiles, "ProfilesService", profiles.ExportProfilesServiceRequest, profiles.ExportProfilesServiceResponse, "rejected_profiles"),
}


def tell(**what):
    print(json.dumps(what), flush=True)


def word():
    """What is answered to this call."""
    global calls
    calls += 1
    at = plan[min(calls, len(plan)) - 1]
    if calls > len(plan) and not at.endswith("*"):
        at = "ok"
    return calls, at.removesuffix("*")


def exhausted(retry):
    status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="busy \x1b[2J")
    if retry:
        delay = duration_pb2.Duration(seconds=0, nanos=300_000_000)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return rpc_status.to_status(status)


def handler(kind):
    _, _, request, response, rejected = KINDS[kind]

    def export(data, context):
        message = request()
        message.ParseFromString(data)
        with lock:
            number, answer = word()
            headers = dict(context.invocation_metadata())
            tell(call=number, kind=kind, answer=answer, bytes=len(data), key=headers.get("x-key"))
            with open(f"{directory}/{number}.{answer}.{kind}", "wb") as file:
                file.write(gzip.compress(data))
        if answer == "unavailable":
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        if answer in ("exhausted", "later"):
            context.abort_with_status(exhausted(answer == "later"))
        if answer == "invalid":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        reply = response()
        if answer == "partly":
            setattr(reply.partial_success, rejected, 1)
            reply.partial_success.error_message = "why"
        return reply.SerializeToString()

    return grpc.unary_unary_rpc_method_handler(export)


server = grpc.server(
    concurrent.futures.ThreadPoolExecutor(4),
    options=[("grpc.max_receive_message_length", int(limit))],
)
for kind, (module, service, *_) in KINDS.items():
    name = module.DESCRIPTOR.services_by_name[service].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": handler(kind)}),))
if tls:
    chain, key = (open(path, "rb").read() for path in tls)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
else:
    port = server.add_insecure_port("127.0.0.1:0")
server.start()
tell(port=port)
sys.stdin.read()
