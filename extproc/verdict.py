"""A decision in one sentence: the node, what it cost, and the difference that decided."""

from typing import Final

from extproc.reports import CandidateReport, DecisionReport, PrefillReport

_BETTER: Final = {
    "wait": "less work is ahead of it there",
    "prefill": "it computes the prompt faster",
    "queue": "it keeps fewer later requests waiting there",
    "pressure": "more KV memory is free there",
    "decode": "it generates the answer faster",
    "harm": "it slows down running answers less there",
}
"""What it means that a node's term is lower than another's."""


def headline(decision: DecisionReport) -> str:
    """Why it is this node, in a sentence (two where the request would wait)."""
    chosen, *others = decision.candidates
    verb = "would be" if decision.is_dry else "was"
    said = f"{chosen.node} {verb} chosen: {seconds(chosen.cost_s)}"
    if decision.pinned:
        said += f" ({_mostly(chosen)}); the client named the node"
    elif not others:
        alone = "no other node could take it" if decision.excluded else "no other node serves the model"
        said += f" ({_mostly(chosen)}); {alone}"
    else:
        said += _compared(decision, chosen, others)
    if decision.waits:
        said = f"It would wait in the queue: its nodes are full. With room, {said}"
    if decision.prefill is not None:
        said += f". {_leg(decision.prefill, decision.is_dry)}"
    return f"{said}."


def seconds(value: float) -> str:
    """Three digits and the unit."""
    if value >= 1000:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 0.1 or value == 0 else f"{value * 1000:.3g} ms"


def _leg(leg: PrefillReport, is_dry: bool) -> str:
    """The prefill leg, in a sentence without its full stop."""
    expected_s = leg.wait_s + leg.prefill_s
    saved = f"which spares the decode nodes {seconds(leg.saved_s)}"
    if is_dry:
        return f"{leg.node} would compute the prompt first, in {seconds(expected_s)}, {saved}"
    if leg.failure is not None:
        return f"{leg.node} was to compute the prompt first, which failed: {leg.failure.replace('_', ' ')}"
    took = "" if leg.took_s is None else f", in {seconds(leg.took_s)} ({seconds(expected_s)} expected)"
    return f"{leg.node} computed the prompt first{took}, {saved}"


def _compared(decision: DecisionReport, chosen: CandidateReport, others: list[CandidateReport]) -> str:
    """What set it apart from the others; nodes of a graver tier may be cheaper."""
    would, verb = ("would cost", "is") if decision.is_dry else ("would have cost", "was")
    runner_up = others[0]
    if decision.equally_cheap > 1:
        said = f" ({_mostly(chosen)}); chance chose among {decision.equally_cheap} equally cheap nodes"
    elif runner_up.cost_s > chosen.cost_s:
        because = _because(decision, chosen, runner_up)
        said = f", because {because}; runner-up {runner_up.node} {would} {seconds(runner_up.cost_s)}"
        said += f" ({_mostly(runner_up)})"
    else:
        said = f" ({_mostly(chosen)})"
    passed_over = [
        other for other in others if other.put_back != chosen.put_back and other.cost_s <= chosen.cost_s
    ]
    if passed_over:
        cheapest = min(passed_over, key=lambda other: other.cost_s)
        reasons = " and ".join(cheapest.put_back)
        said += f"; {cheapest.node} {would} {seconds(cheapest.cost_s)}, but {verb} passed over ({reasons})"
    return said


def _because(decision: DecisionReport, chosen: CandidateReport, runner_up: CandidateReport) -> str:
    """The greatest difference between the two."""
    gain_s = runner_up.cost_s - chosen.cost_s
    unweighted_s = (sum(runner_up.terms_s.values()) - sum(chosen.terms_s.values())) / chosen.divisor
    if chosen.divisor != runner_up.divisor and unweighted_s < gain_s / 2:
        return f"its weight is {chosen.divisor:g}, against {runner_up.divisor:g}"
    gains_s = {
        term: runner_up.terms_s.get(term, 0.0) / runner_up.divisor - value / chosen.divisor
        for term, value in chosen.terms_s.items()
    }
    term = max(gains_s, key=lambda term: gains_s[term])
    counts_matches = decision.policy != "lru"
    if term == "prefill" and counts_matches and chosen.matched_tokens > runner_up.matched_tokens:
        return f"it holds {chosen.matched_tokens:,} of {decision.prompt_tokens:,} prompt tokens"
    return _BETTER.get(term, f"its {term} costs less")


def _mostly(candidate: CandidateReport) -> str:
    """The term that makes up most of the cost, or the two greatest."""
    terms_s = candidate.terms_s
    first, second = sorted(terms_s, key=lambda term: -terms_s[term])[:2]
    if terms_s[first] * 2 >= sum(terms_s.values()):
        return f"mostly {first}"
    return f"mostly {first} and {second}"
