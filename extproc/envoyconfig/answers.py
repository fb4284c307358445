"""What Envoy reads from the answers of nodes, as they pass: the time of the first token, and the usage."""

from extproc import headers
from extproc.envoyconfig.shapes import Json, typed

KEPT_BYTES = 4096
"""The end of an answer in which usage is looked for: engines write it last."""

NEWS_CHUNKS = 256
"""For so many chunks after the first token, the log tells of it: a second's worth, or a few."""

# Envoy's own readers of answers do worse: json_to_metadata holds an answer back and turns one over 1 MiB into
# a 500, and sse_to_metadata takes twice the time for each event. This script delays and holds no chunk.
# Envoy's objects are void after the next chunk: `seen` fetches the metadata anew.
# A line that begins with a colon is a comment that keeps the connection alive; the first events of the
# responses API tell that the request came, before any token; an error is none either.
# In JSON, `"usage":` can only be a member: in a text its quotes have backslashes. The last one counts.
_SCRIPT = f"""\
local kept_bytes = {KEPT_BYTES}

local function seen(handle, key, value)
  handle:streamInfo():dynamicMetadata():set("{headers.ANSWER_NAMESPACE}", key, value)
end

local function is_token(piece)
  if piece:byte(1) == 58 or piece:find('^data: ?{{%s*"error"%s*:') then return false end
  return piece:find('.delta"', 1, true) or not piece:find('"response.', 1, true)
end

function envoy_on_response(handle)
  local answer = handle:headers()
  local coding = answer:get("content-encoding")
  if answer:get(":status") ~= "200" or not answer:get("{headers.NODE}") then return end
  if coding and coding ~= "identity" then return end
  local kind = (answer:get("content-type") or ""):lower()
  local streams = kind:find("^text/event%-stream")
  if not streams and not kind:find("^application/json") then return end

  local waits, pieces, first, last, bytes, news = streams, {{}}, 1, 0, 0, 0
  for chunk in handle:bodyChunks() do
    local from = math.max(0, chunk:length() - kept_bytes)
    local piece = chunk:getBytes(from, chunk:length() - from)
    if waits and #piece > 0 and is_token(piece) then
      waits = false
      seen(handle, "{headers.FIRST_TOKEN}", handle:timestampString(EnvoyTimestampResolution.MICROSECOND))
      seen(handle, "{headers.IS_NEWS}", "yes")
      news = {NEWS_CHUNKS}
    elseif news > 0 then
      news = news - 1
      if news == 0 then seen(handle, "{headers.IS_NEWS}", "no") end
    end
    last = last + 1
    pieces[last], bytes = piece, bytes + #piece
    while bytes - #pieces[first] >= kept_bytes do
      bytes = bytes - #pieces[first]
      pieces[first], first = nil, first + 1
    end
  end

  local text = table.concat(pieces, "", first, last)
  local usage = text:match('.*"usage"%s*:%s*(%b{{}})')
  if usage and not usage:find("[\\128-\\255]") then seen(handle, "{headers.USAGE}", usage) end
  if streams and text:find('data: ?{{%s*"error"%s*:') then seen(handle, "{headers.ERROR}", "yes") end
end
"""


def answer_reader() -> Json:
    """The filter that reads answers of nodes: 1 us of Envoy's time a chunk, some 10 KiB a stream."""
    return typed(
        "inferact.answer_reader",
        "envoy.extensions.filters.http.lua.v3.Lua",
        default_source_code={"inline_string": _SCRIPT},
    )
