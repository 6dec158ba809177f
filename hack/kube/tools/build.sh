#!/usr/bin/env bash
# Builds the test cluster's commands from the modules beside this file, prints the folder they are in.
# A module whose files did not change since its last build is skipped.
# usage: build.sh [MODULE...]     (default: all)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
kubernetes=$(awk '$1 == "k8s.io/kubernetes" || $2 == "k8s.io/kubernetes" {print $NF}' "$here/kubernetes/go.mod" | head -1)
bin=${SPECSERVE_KUBE_BIN:-${XDG_CACHE_HOME:-$HOME/.cache}/specserve/kube/$kubernetes/bin}
mkdir -p "$bin"
minor=${kubernetes#v1.}
minor=${minor%%.*}

# module LDFLAGS OUTPUT PACKAGE...
module() {
    local name=$1 ldflags=$2 output=$3 stamp
    shift 3
    stamp=$(cd "$here/$name" && { cat go.mod go.sum ./*.go; echo "$ldflags"; } | sha256sum)
    [[ $(cat "$bin/.$name" 2>/dev/null) != "$stamp" ]] || return 0
    echo "building $name (the first time takes minutes)" >&2
    (cd "$here/$name" && CGO_ENABLED=0 go build -mod=readonly -trimpath -buildvcs=false -ldflags "-s -w $ldflags" -o "$bin/$output" "$@")
    echo "$stamp" >"$bin/.$name"
    echo "built $name: ${SECONDS} s" >&2
}

(($#)) || set -- kubernetes etcd helm coredns
for name; do
    case $name in
    kubernetes)
        version=k8s.io/component-base/version
        # One call for all six: they share most of their packages.
        module kubernetes "-X $version.gitVersion=$kubernetes -X $version.gitMajor=1 -X $version.gitMinor=$minor" "" \
            k8s.io/kubernetes/cmd/{kube-apiserver,kube-controller-manager,kube-scheduler,kube-proxy,kubelet,kubectl}
        ;;
    etcd) module etcd "" etcd go.etcd.io/etcd/server/v3 ;;
    helm)
        # `helm template` believes in the version of Kubernetes that helm was built with.
        chartutil=helm.sh/helm/v3/pkg/chartutil
        module helm "-X $chartutil.k8sVersionMajor=1 -X $chartutil.k8sVersionMinor=$minor" helm helm.sh/helm/v3/cmd/helm
        ;;
    coredns) module coredns "" coredns . ;;
    lws) module lws "" lws-manager sigs.k8s.io/lws/cmd ;; # for benchmarks
    *) echo "build.sh: no module $name" >&2; exit 2 ;;
    esac
done
echo "$bin"
