"""A serving pod without an engine: the same flags, HTTP paths and control service, and an answer to every prompt.

Engine arguments steer it: `--fake-crash` ends it at once, as a pod does that cannot load its model.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc

from specserve_protos.v1alpha1 import control_pb2 as pb
from specserve_protos.v1alpha1 import control_pb2_grpc
from specserve_workers.drain import short_name, socket_path

BOUNDS_MS = (10.0, 100.0, 1000.0)


class State:
    def __init__(self, pool: str, revision: str) -> None:
        self.pool, self.revision = pool, revision
        self.started_at = time.monotonic()
        self.completions = 0
        self.draining = False
        self.generation = 0
        self.in_force = pb.SpeculationSettings(policy=pb.LENGTH_POLICY_OFF, cap=pb.BATCH_CAP_NONE)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def make_handler(state: State) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_ready = self.path != "/ready" or not state.draining
            self.answer(200 if is_ready else 503, {"data": [{"id": "tiny", "object": "model"}], "object": "list"})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            state.completions += 1
            self.answer(200, {"choices": [{"text": f"from {os.environ['POD_NAME']}"}]})

        def answer(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    return Handler


class Control(control_pb2_grpc.ControlServiceServicer):
    def __init__(self, state: State) -> None:
        self.state = state

    def GetStats(self, request: pb.GetStatsRequest, context: grpc.ServicerContext) -> pb.GetStatsResponse:
        state, count = self.state, self.state.completions
        latency = pb.Histogram(upper_bounds_ms=BOUNDS_MS, counts=[count, 0, 0, 0], sum_ms=5.0 * count)
        dsde = pb.PolicyStats(
            policy=pb.LENGTH_POLICY_DSDE, verified_sequences=count, drafted_tokens=4 * count, accepted_tokens=3 * count
        )
        return pb.GetStatsResponse(
            pod_name=os.environ["POD_NAME"],
            pod_uid=os.environ["POD_UID"],
            pool=state.pool,
            revision=state.revision,
            uptime_seconds=time.monotonic() - state.started_at,
            draining=state.draining,
            requests=pb.RequestStats(
                started=count, succeeded=count, time_to_first_token=latency, time_per_output_token=latency
            ),
            speculation=pb.SpeculationStats(
                in_force=state.in_force, generation=state.generation, started_max_tokens=4, by_policy=[dsde]
            ),
            kv_transfer=pb.KvTransferStats(remote_prefills=count, loaded_tokens=10 * count, loaded_bytes=100 * count),
        )

    def SetSpeculation(
        self, request: pb.SetSpeculationRequest, context: grpc.ServicerContext
    ) -> pb.SetSpeculationResponse:
        applied = request.generation >= self.state.generation
        if applied:
            self.state.generation, self.state.in_force = request.generation, request.settings
        say(f"speculation set to {pb.LengthPolicy.Name(self.state.in_force.policy)}")
        return pb.SetSpeculationResponse(
            in_force=self.state.in_force, generation=self.state.generation, applied=applied
        )


def answer_stop_hooks(state: State) -> None:
    path = socket_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as sock, short_name(path) as name:
        sock.bind(name)
        sock.listen()
        while True:
            hook, _ = sock.accept()
            state.draining = True
            with hook:
                hook.sendall(b"{}\n")


def main(pool: str) -> None:
    arguments = sys.argv[1:]
    engine_arguments = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    if "--fake-crash" in engine_arguments:
        sys.exit("fake engine: the weights cannot be read")
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--control-port", type=int, required=True)
    parser.add_argument("--revision", required=True)
    options, _ = parser.parse_known_args(arguments)
    state = State(pool, options.revision)
    http = ThreadingHTTPServer((options.host, options.http_port), make_handler(state))
    control = grpc.server(ThreadPoolExecutor(2))
    control_pb2_grpc.add_ControlServiceServicer_to_server(Control(state), control)
    control.add_insecure_port(f"{options.host}:{options.control_port}")
    control.start()
    threading.Thread(target=answer_stop_hooks, args=[state], daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=http.shutdown).start())
    say(f"fake {pool} pod serves on {options.host}")
    http.serve_forever()
    control.stop(0.5).wait()
    say(f"drained, {'after' if state.draining else 'without'} a stop hook")
