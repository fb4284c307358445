"""What Envoy reads from a failing answer: whether the engine died, ran out of memory or has no room."""

from collections.abc import Iterable
from typing import Final

from extproc import headers
from extproc.engines.signatures import Signature
from extproc.envoyconfig.shapes import Json, typed

MOST_BYTES: Final = 64 << 10
"""A longer answer is told by its status alone, and so is one that does not say how long it is."""

# A body that is read is held back until it is whole; Envoy decides on the next attempt after that. So
# nothing is read of an answer that may be long or have no end, or that is no error.
_SCRIPT = """\
local signatures = {{
{signatures}
}}
local failing = {{{failing}}}

local function text_of(handle, answer)
  local bytes, coding = tonumber(answer:get("content-length") or ""), answer:get("content-encoding")
  if not bytes or bytes == 0 or bytes > {most} or (coding and coding ~= "identity") then return "" end
  local body = handle:body()
  return body and body:getBytes(0, body:length()):lower() or ""
end

local function fits(signature, status, text)
  if not signature.statuses[status] then return false end
  for _, part in ipairs(signature.texts) do
    if text:find(part, 1, true) then return true end
  end
  return #signature.texts == 0
end

function envoy_on_response(handle)
  local answer = handle:headers()
  answer:remove("{header}")
  local status = answer:get(":status")
  if not failing[status] then return end
  local text = text_of(handle, answer)
  for _, signature in ipairs(signatures) do
    if fits(signature, status, text) then
      handle:headers():replace("{header}", signature.failure)
      return
    end
  end
end
"""


def failure_reader(signatures: Iterable[Signature]) -> Json:
    """The upstream filter that marks the failing answers of an engine with these signatures."""
    script = _SCRIPT.format(
        signatures="\n".join(map(_row, signatures)),
        failing=_set(headers.RETRIED_STATUS),
        most=MOST_BYTES,
        header=headers.FAILURE,
    )
    return typed(
        "inferact.failure_reader",
        "envoy.extensions.filters.http.lua.v3.Lua",
        default_source_code={"inline_string": script},
    )


def _row(signature: Signature) -> str:
    texts = ", ".join(f'"{text}"' for text in signature.texts)
    statuses = _set(signature.statuses)
    return f'  {{failure = "{signature.failure}", statuses = {{{statuses}}}, texts = {{{texts}}}}},'


def _set(statuses: Iterable[int]) -> str:
    return ", ".join(f'["{status}"] = true' for status in statuses)
