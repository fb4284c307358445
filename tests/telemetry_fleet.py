"""A fleet's telemetry, and what its metrics are called."""

from prometheus_client.parser import text_string_to_metric_families

from extproc.config import Config
from extproc.openai.errors import ErrorCode
from extproc.openai.request import Api, parse
from extproc.openai.usage import Usage
from extproc.routing.admission import Admission
from extproc.routing.node import EngineReport, Node
from extproc.routing.outcome import Ended, LegFailure, Outcome
from extproc.routing.router import Router
from extproc.telemetry import Telemetry

MODEL = "meta-llama/Llama-3-8B-Instruct"
LABELS = {
    "inferact_requests_total": {"node", "model"},
    "inferact_kv_cache_used_ratio": {"node"},
    "inferact_prefix_hit_ratio": {"node"},
    "inferact_request_latency_seconds_bucket": {"node", "le"},
    "inferact_request_latency_seconds_sum": {"node"},
    "inferact_request_latency_seconds_count": {"node"},
    "inferact_oom_events_total": {"node"},
    "inferact_requests_in_flight": {"node"},
    "inferact_engine_cap": {"node"},
    "inferact_node_drained": {"node"},
    "inferact_queue_depth": {"priority"},
    "inferact_ttft_seconds_bucket": {"node", "le"},
    "inferact_ttft_seconds_sum": {"node"},
    "inferact_ttft_seconds_count": {"node"},
    "inferact_prompt_tokens_total": {"node", "source"},
    "inferact_output_tokens_total": {"node"},
    "inferact_streams_without_usage_total": {"node"},
    "inferact_prediction_error_ratio": {"node"},
    "inferact_queue_wait_seconds_bucket": {"le"},
    "inferact_queue_wait_seconds_sum": set(),
    "inferact_queue_wait_seconds_count": set(),
    "inferact_decision_seconds_bucket": {"le"},
    "inferact_decision_seconds_sum": set(),
    "inferact_decision_seconds_count": set(),
    "inferact_rejections_total": {"reason"},
    "inferact_retries_total": {"node", "reason"},
    "inferact_node_status": {"node", "status"},
    "inferact_knowledge_level": {"node", "level"},
    "inferact_kv_event_messages_total": {"node"},
    "inferact_kv_event_gaps_total": {"node"},
    "inferact_kv_event_errors_total": {"node"},
    "inferact_policy_active": {"policy"},
    "inferact_prefix_index_blocks": set(),
    "inferact_prefix_index_bytes": set(),
    "inferact_failopen_requests_total": set(),
    "inferact_loop_lag_seconds_bucket": {"le"},
    "inferact_loop_lag_seconds_sum": set(),
    "inferact_loop_lag_seconds_count": set(),
    "inferact_prefill_legs_total": {"node"},
    "inferact_prefill_leg_failures_total": {"node", "reason"},
    "inferact_prefill_fallbacks_total": set(),
    "inferact_prefill_leg_seconds_bucket": {"node", "le"},
    "inferact_prefill_leg_seconds_sum": {"node"},
    "inferact_prefill_leg_seconds_count": {"node"},
    "inferact_build_info": {"version"},
}


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Fleet:
    """A real fleet of two nodes and its telemetry, on a clock that stands still."""

    def __init__(self, policy: str = "prefix-aware", cap: int | None = None) -> None:
        nodes: list[dict[str, object]] = [
            {
                "id": name,
                "hardware": "a100-80g",
                "backend": "vllm",
                "endpoint": "http://127.0.0.1:8000",
                "models": [MODEL],
                "model_aliases": {"llama": MODEL},
            }
            for name in ("node-a", "node-b")
        ]
        nodes[0]["kv_events"] = {"endpoint": "tcp://127.0.0.1:1"}
        self.config = Config.model_validate({"nodes": nodes, "kv_cache": {"policy": policy}})
        self.router = Router(
            (Node(node, node.profile) for node in self.config.nodes), cap, cache=self.config.kv_cache
        )
        self.admission = Admission(self.router, max_waiting=100, max_waiting_bytes=1 << 20)
        self.clock = Clock()
        self.telemetry = Telemetry(self.router, self.admission, self.clock)
        self.node = self.router.nodes["node-a"]

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        text = self.telemetry.render().decode()
        found = [
            ((sample.name, frozenset(sample.labels.items())), sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
        assert len(found) == len(dict(found)), "a series appears twice"
        return dict(found)

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples().get((f"inferact_{name}", frozenset(labels.items())))

    def submit(self, priority: int) -> object:
        body = b'{"model": "%s", "messages": [], "x-inferact": {"priority": %d}}' % (MODEL.encode(), priority)
        request = parse(Api.CHAT_COMPLETIONS, body)
        return self.admission.submit(request, len(body), self.clock(), lambda: None)


def answer(usage: Usage | None = None, ended: Ended = Ended.COMPLETE, ttft_s: float | None = None) -> Outcome:
    """What came of a request."""
    return Outcome(
        node_id="node-a",
        attempts=1,
        status=200,
        ended=ended,
        duration_s=1.0,
        ttft_s=ttft_s,
        usage=usage,
    )


def use_everything(fleet: Fleet) -> None:
    telemetry = fleet.telemetry
    fleet.node.report = EngineReport(fleet.clock(), running=1, waiting=0, kv_used_ratio=0.421)
    fleet.node.prefix_hit_ratio, fleet.node.engine_cap = 0.63, 4
    telemetry.served(fleet.node, MODEL, 0.7)
    telemetry.answered(fleet.node, answer(Usage(100, 10, 60), ttft_s=0.2))
    fleet.node.predictions.add(5, 100, fleet.clock())
    telemetry.retried("node-b", "503")
    telemetry.rejected(ErrorCode.QUEUE_FULL)
    telemetry.decided(0.0001)
    telemetry.queued(0.2)
    telemetry.failed_open()
    telemetry.oom("node-a")
    telemetry.loop_lag(0.002)
    telemetry.prefill_sent("node-a")
    telemetry.prefilled(fleet.node, 0.3, Usage(2000, 1, 500))
    telemetry.prefill_failed("node-a", LegFailure.TIMED_OUT)
    telemetry.went_whole()
