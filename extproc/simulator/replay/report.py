"""What a replay tells of a picker, in numbers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from extproc.simulator.replay.loop import ENOUGH_REQUESTS, LATE_RATIO, Outcome


class NoAnswerError(ValueError):
    """A replay of which nothing can be told."""


class Summary(msgspec.Struct, frozen=True):
    """One replay. Times in seconds, over the requests that were answered; ratios 0-1."""

    requests: int
    refused: int
    late_ratio: float
    """Requests without a first token as the last one arrived."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    latency_mean_s: float
    hit_ratio: float
    """Prompt tokens found in a cache, of all prompt tokens."""
    load_spread: float
    """Prefill seconds of the busiest node over the mean of all: 1 is even, the number of nodes the worst."""
    node_loads: list[float]
    """Prefill seconds of each node over the mean."""
    pick_mean_us: float
    pick_p99_us: float

    @property
    def overloaded(self) -> bool:
        """Whether more came than was answered, so that times grow with the length of the trace."""
        return self.requests >= ENOUGH_REQUESTS and self.late_ratio > LATE_RATIO


@dataclass(frozen=True, slots=True)
class Panel:
    """The policies compared under one workload, best first."""

    title: str
    rows: Sequence[tuple[str, Summary]]

    @classmethod
    def of(cls, title: str, rows: Iterable[tuple[str, Summary]]) -> "Panel":
        """The least mean time to first token is the best."""
        return cls(title, sorted(rows, key=lambda row: row[1].ttft_mean_s))


def summarize(outcome: Outcome) -> Summary:
    """The numbers of one replay. Raises `NoAnswerError`."""
    answered = [job for job in outcome.jobs if not job.refused]
    if not answered:
        raise NoAnswerError(
            "no request was answered: each is longer than the KV memory of the node that it was sent to"
        )
    ttfts = sorted(job.ttft_s for job in answered)
    picks = sorted(outcome.pick_s)
    mean_load = fmean(outcome.prefill_s)
    loads = [seconds / mean_load for seconds in outcome.prefill_s]
    return Summary(
        requests=len(outcome.jobs),
        refused=len(outcome.jobs) - len(answered),
        late_ratio=outcome.late_ratio,
        ttft_mean_s=fmean(ttfts),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p90_s=percentile(ttfts, 90),
        ttft_p99_s=percentile(ttfts, 99),
        latency_mean_s=fmean(job.latency_s for job in answered),
        hit_ratio=sum(job.cached_tokens for job in answered)
        / sum(job.request.prompt_tokens for job in answered),
        load_spread=max(loads),
        node_loads=loads,
        pick_mean_us=fmean(picks) * 1e6,
        pick_p99_us=percentile(picks, 99) * 1e6,
    )


def percentile(ordered: Sequence[float], pct: float) -> float:
    """The nearest-rank percentile of ascending values."""
    return ordered[max(0, math.ceil(len(ordered) * pct / 100) - 1)]


def mean_of(summaries: Sequence[Summary]) -> Summary:
    """Each number averaged over replays that differ by their seed alone; counts are added up."""
    first = msgspec.structs.asdict(summaries[0])
    means: dict[str, object] = {}
    for name in first:
        values = [getattr(summary, name) for summary in summaries]
        if name == "node_loads":
            means[name] = [fmean(loads) for loads in zip(*values, strict=True)]
        elif name in ("requests", "refused"):
            means[name] = sum(values)
        else:
            means[name] = fmean(values)
    return msgspec.convert(means, Summary)
