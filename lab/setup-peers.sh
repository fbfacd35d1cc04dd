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
if [ "${ID:-}" = ubuntu ]; then
	# universe has them, and is on by default.
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nvtop gpustat tmux
	exit 0
fi
if [ "${ID:-}" != debian ] || [ -z "${VERSION_CODENAME:-}" ]; then
	echo "setup-peers.sh: knows Debian and Ubuntu, found ${ID:-?}: install nvtop, gpustat and tmux by hand" >&2
	exit 1
fi

# The machine's own sources and one more: the packages' dependencies are in
# main, which the machine has.
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT INT TERM
chmod 755 "$sources"
cp /etc/apt/sources.list.d/* "$sources"/ 2>/dev/null || true # there may be none
list=$sources/gpuledger-peers.list
# apt refuses two entries for one archive that differ in Signed-By.
key=$(sed -n 's/^Signed-By: *//p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -n 1)
# The archive that the machine itself uses for this release.
apt-get update -qq
archive=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: $VERSION_CODENAME" | head -n 1)
if [ -z "$archive" ]; then
	echo "setup-peers.sh: apt knows no archive of $VERSION_CODENAME: install nvtop, gpustat and tmux by hand" >&2
	exit 1
fi
# non-free holds libnvidia-ml1, which the packages depend on.
echo "deb ${key:+[signed-by=$key] }$archive $VERSION_CODENAME contrib non-free" >"$list"
chmod 644 "$list"

apt-get update -qq -o Dir::Etc::sourceparts="$sources" -o APT::Get::List-Cleanup=0
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	-o Dir::Etc::sourceparts="$sources" nvtop gpustat tmux
