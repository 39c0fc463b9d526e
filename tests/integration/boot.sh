#!/bin/sh
# A machine of its own: systemd as process 1 over a root that another script mounts.
# In new namespaces; $1: an empty folder; $2: what mounts the root and prepares it, given that folder; then systemd's own
# arguments.
set -e
box=$1 prepare=$2
shift 2
mount --make-rprivate /
mount -t tmpfs box "$box"
mkdir "$box/root"
root=$box/root
"$prepare" "$root" >&2
for folder in run tmp dev; do mount -t tmpfs tmpfs "$root/$folder"; done
for device in null zero full random urandom tty; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t proc proc "$root/proc"
mount --bind -o ro "$root/proc/sys" "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs tmpfs "$root/sys/fs/cgroup"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
cd "$root"
mkdir -p old
pivot_root . old
umount -l /old
exec env -i container=outrider-test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --show-status=0 "$@"
