#!/bin/sh
# Starts Slurm on an emulated host, for slurm.py. Everything ends with the host.
set -eu
mkdir -p /run/munge /run/slurm/state /run/slurm/spool

# Slurm loads libpmix by this name, which Debian has only in libpmix-dev, a large package.
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
