//go:build tools

// Package tools names the manager of LeaderWorkerSet, an operator to measure beside ours, so that go.mod pins it.
package tools

import _ "sigs.k8s.io/lws/cmd"
