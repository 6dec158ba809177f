{{/* Pods of services, where the operator looks for services. */}}
{{- define "specserve.servicePods" -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/managed-by: specserve
  {{- with .Values.watch.namespaces }}
  namespaceSelector:
    matchExpressions:
      - key: kubernetes.io/metadata.name
        operator: In
        values: {{- toYaml . | nindent 10 }}
  {{- else }}
  namespaceSelector: {}
  {{- end }}
{{- end }}
