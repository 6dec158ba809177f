{{/* Prefix of all names. Leaves room for "-operator" in the 63 characters of a Service's name. */}}
{{- define "specserve.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- $name = .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- $name = .Release.Name -}}
{{- else -}}
{{- $name = printf "%s-%s" .Release.Name $name -}}
{{- end -}}
{{- $name | trunc 54 | trimSuffix "-" -}}
{{- end }}

{{- define "specserve.operator" -}}
{{ include "specserve.fullname" . }}-operator
{{- end }}

{{- define "specserve.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "specserve.operator" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- define "specserve.identitySecret" -}}
{{- if not (or .Values.identity.secret.create .Values.identity.secret.name) -}}
{{- fail "identity.secret.name: needed with identity.secret.create=false, the operator keeps its CA there" -}}
{{- end -}}
{{ default (printf "%s-identity" (include "specserve.operator" .)) .Values.identity.secret.name }}
{{- end }}

{{/* Never changes: NetworkPolicies that the operator makes select its pods by the name. */}}
{{- define "specserve.selectorLabels" -}}
app.kubernetes.io/name: specserve-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "specserve.podLabels" -}}
{{ include "specserve.selectorLabels" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: specserve
{{- end }}

{{- define "specserve.labels" -}}
{{ include "specserve.podLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The user's labels with ours, which win. Takes [ours as YAML, the user's]. */}}
{{- define "specserve.merged" -}}
{{- mergeOverwrite (deepCopy (index . 1)) (index . 0 | fromYaml) | toYaml -}}
{{- end }}

{{/* An image's reference. Takes [root, image]. */}}
{{- define "specserve.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- with $root.Values.imageRegistry -}}
{{ trimSuffix "/" . }}/
{{- end -}}
{{ $image.repository }}
{{- if $image.digest -}}
@{{ $image.digest }}
{{- else -}}
:{{ default $root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end }}

{{- define "specserve.gatewayImage" -}}
{{- $image := .Values.gateway.image -}}
{{- if $image.repository -}}
{{ include "specserve.image" (list . $image) }}
{{- else if or $image.tag $image.digest -}}
{{- fail "gateway.image.repository: needed with gateway.image.tag or gateway.image.digest" -}}
{{- else -}}
{{ include "specserve.image" (list . .Values.engine.image) }}
{{- end -}}
{{- end }}
