"""The exchanges that live, and for a while those that are over: their log entries come later."""

from collections import OrderedDict

from extproc.exchange import Exchange, Phase

ENDED_KEPT = 4_096
"""Exchanges that are over and whose entry has not come: older ones are forgotten."""


class Exchanges:
    """Finds exchanges by their ids."""

    def __init__(self) -> None:
        self.live: dict[str, Exchange] = {}
        self._ended: OrderedDict[str, Exchange] = OrderedDict()

    def begin(self, exchange: Exchange) -> None:
        """A new one."""
        self.live[exchange.id] = exchange

    def end(self, exchange: Exchange, now_s: float) -> None:
        """It is over; kept until `take`, if it was sent to a node."""
        del self.live[exchange.id]
        sent = exchange.phase is Phase.ANSWERED and exchange.decision is not None
        exchange.end(now_s)
        if sent:
            self._ended[exchange.id] = exchange
            if len(self._ended) > ENDED_KEPT:
                self._ended.popitem(last=False)

    def find(self, exchange_id: str) -> Exchange | None:
        """One that lives, or whose entry has not come yet."""
        return self.live.get(exchange_id) or self._ended.get(exchange_id)

    def take(self, exchange_id: str) -> Exchange | None:
        """The exchange whose entry has come, perhaps before its end; one that is over is forgotten now."""
        return self._ended.pop(exchange_id, None) or self.live.get(exchange_id)
