#!/usr/bin/env bash
# The demo: simulated GPUs, real processes of several users, the real exporter,
# the real accounting. Everything lives in one temporary directory and is
# stopped at the end. DEMO_SECONDS=60 ends by itself; without, Ctrl-C ends it.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${DEMO_SECONDS:-0}
bin=$PWD/bin
# The journal is for whom the kernel names, and it names nobody with this uid.
[ "$(id -u)" != "$(cat /proc/sys/kernel/overflowuid)" ] || {
  echo "demo: uid $(id -u) stands for every user that the kernel can't tell: run it as another user" >&2
  exit 1
}
work=$(mktemp -d "${TMPDIR:-/tmp}/gpuledger-demo.XXXXXX")
chmod 755 "$work"
socket=$work/exporter.sock
declare -A pid=()
# The programs run in sessions of their own (setsid): a Ctrl-C is for this
# script alone, which then ends them in order.

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n== %s\n' "$*"; }

stop() { # stop NAME: SIGTERM by its own PID, and wait
  local id=${pid[$1]:-}
  [ -n "$id" ] || return 0
  unset "pid[$1]"
  kill -TERM "$id" 2>/dev/null || true
  wait "$id" 2>/dev/null || true
}
cleanup() {
  stop accounting
  stop exporter
  stop lab
  rm -rf "$work"
}
trap cleanup EXIT
trap 'interrupted=1' INT TERM
interrupted=0

fail() {
  echo "demo: $1" >&2
  tail -n 20 "$work"/*.log >&2 || true
  exit 1
}
await() { # await SECONDS WHAT COMMAND...: until it succeeds
  local until=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $until ] || fail "$what did not happen"
    [ $interrupted -eq 0 ] || exit 130
    sleep 0.2 || true
  done
}
pause() { # pause SECONDS: or until Ctrl-C
  local until=$((SECONDS + $1))
  while [ $SECONDS -lt $until ] && [ $interrupted -eq 0 ]; do sleep 0.2 || true; done
}

port() { # port FIRST: a free one from there
  local p=$1
  while (exec 3<>"/dev/tcp/127.0.0.1/$p") 2>/dev/null; do p=$((p + 1)); done
  echo "$p"
}
exporter_port=$(port 10094)
accounting_port=$(port $((exporter_port + 1)))

scrape() { # /metrics by the shell alone: a fresh machine has no curl
  exec 3<>"/dev/tcp/127.0.0.1/$exporter_port"
  printf 'GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n' >&3
  cat <&3
  exec 3>&-
}

start_exporter() {
  echo "runtimes: {docker: [\"$docker_socket\"]}" >"$work/exporter.yml"
  setsid "$bin/gpu-exporter" --config.file="$work/exporter.yml" --nvml.library-path="$bin/lab/libnvidia-ml.so.1" --socket="$socket" --state.dir="$work/exporter" \
    --state.lock="$work/exporter.lock" --node.name=demo --web.listen-address="127.0.0.1:$exporter_port" >>"$work/exporter.log" 2>&1 &
  pid[exporter]=$!
  await 20 "the exporter's first reading" "$bin/gwho" --socket="$socket"
}

create=()
users=()
uid=61001
for name in alice bob carol; do
  # Whoever already has the name lends it: the demo's processes only sleep.
  if have=$(id -u "$name" 2>/dev/null); then
    users+=("$name:$have")
  else
    while getent passwd "$uid" >/dev/null; do uid=$((uid + 1)); done
    users+=("$name:$uid")
    uid=$((uid + 1))
  fi
done
[ "$(id -u)" != 0 ] || create=(--create-users)
say "Simulated GPUs and real processes"
export GPULAB_SCENARIO=$work/lab/scenario.txt
docker=()
docker_socket=${DEMO_DOCKER_SOCKET:-/var/run/docker.sock}
if [ "$(id -u)" = 0 ] && [ -S "$docker_socket" ] && docker --host "unix://$docker_socket" version >/dev/null 2>&1; then
  docker=(--docker-host "unix://$docker_socket")
fi
setsid "$bin/gpu-lab" up "${docker[@]}" --state "$work/lab" --scenario "$GPULAB_SCENARIO" --users="$(IFS=,; echo "${users[*]}")" "${create[@]}" >"$work/lab.log" 2>&1 &
pid[lab]=$!
await 60 "the lab's scenario" test -s "$GPULAB_SCENARIO"
cat "$work/lab.log"

say "gpu-exporter on 127.0.0.1:$exporter_port, gpu-accounting on 127.0.0.1:$accounting_port"
start_exporter
cat >"$work/accounting.yml" <<CONFIG
listen: 127.0.0.1:$accounting_port
ledger: {url: "sqlite://$work/ledger.db"}
collect:
  interval: 2s
  targets: ["unix://$socket"]
billing:
  timezone: UTC
  currency: EUR
  rates:
    - {name: gpu, gpu: "*", per: gpu_hour, price: "2.50", from: 2020-01-01}
accounts:
  - {name: vision-lab, members: [{user: alice}, {user: bob}]}
  - {name: language-lab, members: [{user: carol}, {user: ollama}]}
CONFIG
setsid "$bin/gpu-accounting" serve --config.file="$work/accounting.yml" >"$work/accounting.log" 2>&1 &
pid[accounting]=$!

shown=$((seconds > 20 ? seconds / 3 : 5))
pause "$shown"

say "gwho: who holds which GPU"
"$bin/gwho" --socket="$socket" || [ $? -eq 3 ]

say "/metrics (a sample)"
scrape >"$work/metrics"
grep -E '^gpu_(utilization_ratio|workload_share_seconds_total|workload_energy_joules_total|state_seconds_total|conservation_error_seconds)' "$work/metrics" | head -n 24

if [ "$seconds" -eq 0 ]; then
  say "Serving until Ctrl-C"
  echo "  $bin/gwho --socket=$socket"
  echo "  curl http://127.0.0.1:$exporter_port/metrics"
  while [ $interrupted -eq 0 ]; do sleep 0.5 || true; done
else
  pause $((seconds - shown > 8 ? seconds - shown - 8 : 1))
fi

# A bucket is a quarter hour; the end of a run ends its rows at once. So the
# exporter is restarted, as an upgrade would, and its rows are collected.
say "The exporter restarts, as for an upgrade; its rows go to accounting"
interrupted=0
stop exporter
start_exporter
month=$(date -u +%Y-%m)
report() { "$bin/gpu-accounting" report --config.file="$work/accounting.yml" --month "$month" --format "$1"; }
verify() { "$bin/gpu-accounting" verify --config.file="$work/accounting.yml"; }
collected() { # every final row of the journal is in the ledger
  [ "$("$bin/gpu-exporter" export --state.dir="$work/exporter" | wc -l)" = "$(verify | awk '$1 == "rows" { print $2 }')" ]
}
await 20 "the rows' arrival" collected

say "gpu-accounting report --format table"
report table
say "gpu-accounting report --format csv"
report csv
say "gpu-accounting verify"
verify
