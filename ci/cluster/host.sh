#!/bin/sh
# The first process of an emulated host. hosts.py starts it in namespaces of its own, as
# `sh host.sh TAG NAME FILES`, where files.py has written the folder FILES. Only this host sees
# what is mounted here, and the mounts disappear with it.
set -eu
name=$2

cd "$3" # mounts may hide its path
hostname "$name"
ip link set lo up
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=0755 tmpfs /run
mkdir /run/sshd
mkdir -m 1777 /run/tmp
cp -Rp etc hostfile /run
cd /
echo "$name" >/run/etc/hostname
for path in /run/etc/*
do
    ! [ -e "/etc/${path##*/}" ] || mount --bind "$path" "/etc/${path##*/}"
done
# The keys and settings of whoever uses this machine are none of the host's business.
! [ -d ~root/.ssh ] || mount -t tmpfs tmpfs ~root/.ssh

# Not exec: this process is known by its name and arguments, and sshd changes its own.
/usr/sbin/sshd -D -e &
wait
