"""Conversations of several turns, as chat applications have them, and what was cached of their prompts."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import httpx
from engine_processes import MODEL

SESSIONS, TURNS, CLIENTS = 40, 6, 4
_KINDS = 5
"""Sessions of a kind begin with the same instructions."""
_INSTRUCTIONS = 1400
_SHORTEST, _LONGEST = 100, 300
"""Words and numbers."""
_VOCABULARY = (
    "argument attribute buffer bytes called class code context current default directory empty error "
    "event example exception false file first following format function given handler headers import "
    "index instance integer interface internal item iterable iterator length level line list local "
    "manager mapping message method module name normal number object open option output package parent "
    "path pattern position process protocol python raise random range read request result return section "
    "sequence server single socket stack start state status stop stream string support system target "
    "thread time token type value variable version warning window with without write "
)
_WORDS = _VOCABULARY.split()
_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Session:
    """A conversation so far."""

    number: int
    chance: random.Random
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: int = 0

    def __post_init__(self) -> None:
        kind = random.Random(self.number % _KINDS)
        self.messages.append({"role": "system", "content": _text(kind, _INSTRUCTIONS)})

    def body(self) -> dict[str, Any]:
        """The next question."""
        self.messages.append(
            {"role": "user", "content": _text(self.chance, self.chance.randrange(_SHORTEST, _LONGEST))}
        )
        return {
            "model": MODEL,
            "messages": self.messages,
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
        }

    def answered(self, text: str) -> None:
        """The engine has said this."""
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1


@dataclass(slots=True, frozen=True)
class Turn:
    """What an engine reported of a request."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int


def _text(chance: random.Random, words: int) -> str:
    """With a number here and there, so that tokens have four bytes, as those of real models have."""
    return " ".join(
        f"{' '.join(chance.choices(_WORDS, k=3))} {chance.randrange(100)}" for _ in range(words // 4)
    )


async def converse(url: str, seed: int) -> list[Turn]:
    """Have all sessions out, the next turn of any of them whenever a client is free; an answer each."""
    order = random.Random(seed)
    waiting = [Session(number, random.Random(f"{seed}-{number}")) for number in range(SESSIONS)]
    turns: list[Turn] = []

    async def client(http: httpx.AsyncClient) -> None:
        while waiting:
            session = waiting.pop(order.randrange(len(waiting)))
            answer = await http.post("/v1/chat/completions", json=session.body())
            assert answer.status_code == 200, answer.text
            said = answer.json()
            session.answered(said["choices"][0]["message"]["content"])
            turns.append(_turn(answer, said["usage"]))
            if session.turns < TURNS:
                waiting.append(session)

    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=_TIMEOUT_S) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return turns


def _turn(answer: httpx.Response, usage: dict[str, Any]) -> Turn:
    details = usage["prompt_tokens_details"] or {}
    return Turn(
        answer.headers.get("x-request-id", ""), usage["prompt_tokens"], details.get("cached_tokens") or 0
    )
