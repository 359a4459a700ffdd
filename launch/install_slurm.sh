#!/usr/bin/env bash
# Installs Debian's Slurm packages for the tests. No daemon is started and nothing is configured, because
# tests/support/slurm.py runs its own cluster.
#   bash launch/install_slurm.sh
set -euo pipefail

PACKAGES=(munge slurm-client slurmctld slurmd)
if command -v sbatch slurmctld slurmd munged >/dev/null; then
    exit 0
fi
echo "install_slurm: installing ${PACKAGES[*]} (Debian)"
had=()
if [[ -e /usr/sbin/policy-rc.d ]]; then had=(yes); fi
if [[ ${#had[@]} -eq 0 ]]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d # prevents the packages from starting their daemons
    chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${PACKAGES[@]}" >/dev/null
