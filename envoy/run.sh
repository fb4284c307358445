#!/usr/bin/env bash
# Runs Envoy with the options given here. On SIGTERM it takes no new connection, lets running requests end,
# and stops then, or after DRAIN_LIMIT_S; a second signal stops it at once.
#
# In bash alone, because the official image has no curl.
set -u

admin_port=${ENVOY_ADMIN_PORT:-9901} # `scheduler.envoy_admin_port`
limit_s=${DRAIN_LIMIT_S:-30}
running=http.inferact.downstream_rq_active

ask() ( # METHOD PATH: prints Envoy's answer
  exec 3<> "/dev/tcp/127.0.0.1/$admin_port" || exit
  printf '%s %s HTTP/1.1\r\nHost: envoy\r\nConnection: close\r\nContent-Length: 0\r\n\r\n' "$1" "$2" >&3
  cat <&3
)

busy() { # whether requests are running; not when Envoy does not answer any more
  ask GET "/stats?filter=^$running\$" | grep -q "^$running: [1-9]"
}

stop() {
  trap 'kill -TERM "$envoy"' TERM INT
  # The first alone accepts for minutes to come; the second alone leaves idle connections open.
  ask POST '/drain_listeners?graceful&skip_exit' > /dev/null
  ask POST '/drain_listeners' > /dev/null
  local until_s=$((SECONDS + limit_s))
  while busy && ((SECONDS <= until_s)); do sleep 0.1; done
  kill -TERM "$envoy"
}

envoy "$@" &
envoy=$!
trap stop TERM INT
wait "$envoy"
code=$?
while kill -0 "$envoy" 2> /dev/null; do # a signal ended the wait, not Envoy
  wait "$envoy"
  code=$?
done
exit "$code"
