{{/* "true" if an object of monitoring is wanted. Takes [root, enabled, API that `auto` looks for]. */}}
{{- define "specserve.isWanted" -}}
{{- $enabled := index . 1 | toString -}}
{{- if eq $enabled "auto" -}}
{{ (index . 0).Capabilities.APIVersions.Has (index . 2) }}
{{- else -}}
{{ $enabled }}
{{- end -}}
{{- end }}
