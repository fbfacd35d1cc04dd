#!/bin/sh
# Install the independent NVML clients that the lab's ABI check runs
# unmodified: Debian's nvtop and gpustat. Both live in the contrib section,
# which a stock image doesn't list, so apt is given a sources file of its own
# for this one call: the machine's apt configuration stays as it was.
#
# usage: lab/setup-peers.sh            (as root, Debian 12 or later)
set -eu

if command -v nvtop >/dev/null && command -v gpustat >/dev/null && command -v tmux >/dev/null; then
	exit 0
fi
if [ "$(id -u)" != 0 ]; then
	echo "setup-peers.sh: must run as root to install packages" >&2
	exit 1
fi

. /etc/os-release
if [ "${ID:-}" != debian ] || [ -z "${VERSION_CODENAME:-}" ]; then
	echo "setup-peers.sh: knows Debian only, found ${ID:-?}: install nvtop, gpustat and tmux by hand" >&2
	exit 1
fi

list=$(mktemp --suffix=.list)
trap 'rm -f "$list"' EXIT INT TERM
# apt refuses two entries for one archive that differ in Signed-By.
key=$(sed -n 's/^Signed-By: *//p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -n 1)
# non-free holds libnvidia-ml1, which the packages depend on.
# The archive that the machine itself uses for this release.
apt-get update -qq
archive=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: $VERSION_CODENAME" | head -n 1)
if [ -z "$archive" ]; then
	echo "setup-peers.sh: apt knows no archive of $VERSION_CODENAME: install nvtop, gpustat and tmux by hand" >&2
	exit 1
fi
echo "deb ${key:+[signed-by=$key] }$archive $VERSION_CODENAME contrib non-free" >"$list"
chmod 644 "$list"

apt-get update -qq -o Dir::Etc::sourcelist="$list" -o Dir::Etc::sourceparts=- -o APT::Get::List-Cleanup=0
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	-o Dir::Etc::sourcelist="$list" nvtop gpustat tmux
