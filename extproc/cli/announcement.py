"""What `inferact up` prints when it is ready: how to use it, in lines that can be copied."""

import json
import shlex
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from extproc.cli.adminkey import KEY
from extproc.cli.client import DEFAULT_URL
from extproc.config import Config, HostPort
from extproc.config.models import ENVOY_ADMIN_HOST
from extproc.routing.node import Health, Node


def announcement(
    config: Config, path: Path, nodes: Collection[Node], admin: bool, made_key: str | None = None
) -> str:
    """The text. `admin`: there is an admin key; `made_key`: it was made for this run, so show it."""
    scheduler = config.scheduler
    url, envoy = _url(scheduler.host, scheduler.port), _url(ENVOY_ADMIN_HOST, scheduler.envoy_admin_port)
    return f"""
{_greeting(url, nodes)}
Look after it:

{_operations(config, nodes, admin, made_key)}
  dashboard {url}/dashboard
  metrics   {url}/metrics, and Envoy's own: {envoy}/stats/prometheus
  logs      {scheduler.run_dir}/*.log (requests in access.log)
  settings  {path}
  stop      Ctrl-C
"""


def _greeting(url: str, nodes: Collection[Node]) -> str:
    """What to ask the nodes that answer, or that none does."""
    usable = [node for node in nodes if node.health is Health.HEALTHY and not node.drained]
    answering = sum(node.health is Health.HEALTHY for node in nodes)
    count = f"{answering} of {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} "
    count += "answers" if answering == 1 else "answer"
    if not answering:
        return f"Inferact is listening at {url}; {count}: see `inferact status`.\n"
    if not usable:
        return f"Inferact is listening at {url}; {count}, and all that do are drained.\n"
    questions = _questions(url, usable[0].config.models[0])
    return f"Inferact is ready at {url} ({count}). Ask it something:\n\n{questions}\n"


def _questions(url: str, model: str) -> str:
    """The same request with curl and with OpenAI's client."""
    messages = [{"role": "user", "content": "Hello"}]
    body = shlex.quote(json.dumps({"model": model, "messages": messages}))
    return f"""\
  curl {url}/v1/chat/completions -H 'content-type: application/json' -d {body}

  # run this with {shlex.quote(_python())} (pip install openai, if it is missing there)
  from openai import OpenAI

  client = OpenAI(base_url="{url}/v1", api_key="any")
  answer = client.chat.completions.create(model={json.dumps(model)}, messages={json.dumps(messages)})
  print(answer.choices[0].message.content)"""


def _operations(config: Config, nodes: Collection[Node], admin: bool, made_key: str | None) -> str:
    """How to see the nodes, how to drain one that is not, and how to put it or a drained one back."""
    scheduler = config.scheduler
    drained, open_to_drain = ([node.id for node in nodes if node.drained is state] for state in (True, False))
    admin_url = _url(scheduler.admin_host, scheduler.admin_port)
    where = () if admin_url == DEFAULT_URL else ("--url", admin_url)
    known = f"{KEY}={made_key or '...'} "

    def command(*words: str) -> str:
        return shlex.join((*this_command(), *words, *where))

    lines = [f"  status    {command('status')}"]
    if drained:
        lines.append(f"  drained   {', '.join(drained)}")
    if not admin:
        lines.append(f"  drain     off, because there is no admin key: start with {KEY} set")
        return "\n".join(lines)
    if open_to_drain:
        lines.append(f"  drain     {known}{command('drain', open_to_drain[0], '--wait')}")
    lines.append(f"  restore   {known}{command('restore', (drained or open_to_drain)[0])}")
    return "\n".join(lines)


def this_command() -> tuple[str, ...]:
    """How to call this very command again, from the current folder."""
    called = Path(sys.argv[0])
    if called.name != "inferact":
        return (_python(), "-m", "extproc.cli")
    return ("inferact",) if shutil.which("inferact") == str(called) else (_from_here(called),)


def _python() -> str:
    """How to call this very Python, from the current folder."""
    return _from_here(Path(sys.executable))


def _from_here(program: Path) -> str:
    here = Path.cwd()
    return str(program.relative_to(here) if program.is_relative_to(here) else program)


def _url(host: str, port: int) -> str:
    """Where this machine reaches a listener."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{HostPort(reachable, port)}"
