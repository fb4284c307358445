"""What `inferact up` prints when it is ready: how to use it, in lines that can be copied."""

import json
import shlex
import shutil
import sys
from pathlib import Path

from extproc.cli.adminkey import KEY
from extproc.cli.client import DEFAULT_URL
from extproc.config import Config, HostPort
from extproc.config.models import ENVOY_ADMIN_HOST


def announcement(config: Config, path: Path, admin: bool, made_key: str | None = None) -> str:
    """The text. `admin`: there is an admin key; `made_key`: it was made for this run, so show it."""
    scheduler = config.scheduler
    url, envoy = _url(scheduler.host, scheduler.port), _url(ENVOY_ADMIN_HOST, scheduler.envoy_admin_port)
    return f"""
Inferact is ready at {url} ({len(config.nodes)} nodes). Ask it something:

{_questions(url, config.nodes[0].models[0])}

Look after it:

{_operations(config, admin, made_key)}
  metrics   {url}/metrics, and Envoy's own: {envoy}/stats/prometheus
  logs      {scheduler.run_dir}/*.log (requests in access.log)
  settings  {path}
  stop      Ctrl-C
"""


def _questions(url: str, model: str) -> str:
    """The same request with curl and with OpenAI's client."""
    messages = [{"role": "user", "content": "Hello"}]
    body = shlex.quote(json.dumps({"model": model, "messages": messages}))
    return f"""\
  curl {url}/v1/chat/completions -H 'content-type: application/json' -d {body}

  from openai import OpenAI

  client = OpenAI(base_url="{url}/v1", api_key="any")
  answer = client.chat.completions.create(model={json.dumps(model)}, messages={json.dumps(messages)})
  print(answer.choices[0].message.content)"""


def _operations(config: Config, admin: bool, made_key: str | None) -> str:
    """How to see the nodes, and how to drain one."""
    scheduler, node = config.scheduler, config.nodes[0].id
    admin_url = _url(scheduler.admin_host, scheduler.admin_port)
    where = () if admin_url == DEFAULT_URL else ("--url", admin_url)
    known = f"{KEY}={made_key} " if made_key else ""

    def command(*words: str) -> str:
        return shlex.join((*_inferact(), *words, *where))

    if not admin:
        return f"""\
  status    {command("status")}
  drain     off, because there is no admin key: start with {KEY} set"""
    return f"""\
  status    {command("status")}
  drain     {known}{command("drain", node, "--wait")}
  restore   {known}{command("restore", node)}"""


def _inferact() -> tuple[str, ...]:
    """How to call this very command again, from the current folder."""
    called = Path(sys.argv[0])
    if called.name != "inferact":
        return sys.executable, "-m", "extproc.cli"
    if shutil.which("inferact") == str(called):
        return ("inferact",)
    here = Path.cwd()
    return (str(called.relative_to(here) if called.is_relative_to(here) else called),)


def _url(host: str, port: int) -> str:
    """Where this machine reaches a listener."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{HostPort(reachable, port)}"
