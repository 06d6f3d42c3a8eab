#!/bin/sh
# Starts Slurm on an emulated host, for slurm.py. All ends with the host.
set -eu
mkdir -p /run/munge /run/slurm/state /run/slurm/spool

# By this name Slurm loads it, which Debian has in libpmix-dev only, for all its size.
for folder in /usr/lib/*/pmix2/lib
do
    [ ! -e "$folder/libpmix.so" ] || continue
    cp -R "$folder" /run/slurm/pmix
    ln -s libpmix.so.2 /run/slurm/pmix/libpmix.so
    mount --bind /run/slurm/pmix "$folder"
done

munged --force --log-file=/run/munge/log --seed-file=/run/munge/seed
[ "$(hostname)" != "$1" ] || slurmctld
slurmd
