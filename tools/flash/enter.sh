#!/bin/sh
# A command in a mounted root file system as if that were this machine's: in namespaces that $0 was started in, so that
# nothing stays mounted. $1: the root; $2: the command's user and group; then the command.
set -e
root=$1 user=$2
shift 2
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
for folder in run tmp; do mount -t tmpfs -o mode=1777 tmpfs "$root/$folder"; done
# Names are looked up as this machine does. The root's own file may be a link to what a service would write at /run.
names=$root$(chroot "$root" readlink -m /etc/resolv.conf)
if [ -e /etc/resolv.conf ]; then
  mkdir -p "${names%/*}"
  [ -e "$names" ] || : > "$names"
  mount --bind /etc/resolv.conf "$names"
fi
exec chroot --userspec="$user" "$root" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} "$@"
