{{- define "specserve.operatorArgs" -}}
- --default-engine-image={{ include "specserve.image" (list . .Values.engine.image) }}
- --gateway-image={{ include "specserve.gatewayImage" . }}
{{- range .Values.watch.namespaces }}
- --watch-namespace={{ . }}
{{- end }}
- --health-port=8080
- --metrics-port=9090
- --identity-port=9443
- --identity-secret={{ include "specserve.identitySecret" . }}
- --identity-service={{ include "specserve.operator" . }}.{{ .Release.Namespace }}.svc
- --certificate-lifetime-seconds={{ int .Values.identity.certificateLifetimeSeconds }}
- {{ .Values.networkPolicy.services | ternary "--network-policies" "--no-network-policies" }}
{{- if .Values.leaderElection.enabled }}
- --leader-election
- --leader-election-lease={{ include "specserve.operator" . }}
{{- else }}
- --no-leader-election
{{- end }}
- --log-format={{ .Values.logging.format }}
- --log-level={{ .Values.logging.level }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* Both contexts together satisfy the "restricted" Pod Security Standard. */}}
{{- define "specserve.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "specserve.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
