{{/*
What the operator may do where services are. A Role in each watched namespace, or a ClusterRole.
Roles: the operator makes one for each gateway, and may only hand out what it has itself: reading pods.
What belongs to a service as long as it lives is deleted with it, by Kubernetes, and never by the operator.
*/}}
{{- define "specserve.serviceRules" -}}
- apiGroups: [specserve.dev]
  resources: [speculativeservices]
  verbs: [list, watch]
- apiGroups: [specserve.dev]
  resources: [speculativeservices/status, poolscalers/status]
  verbs: [patch]
# So that children may block the deletion of their service where the API server checks that.
- apiGroups: [specserve.dev]
  resources: [speculativeservices/finalizers]
  verbs: [update]
- apiGroups: [specserve.dev]
  resources: [poolscalers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, create, patch]
{{- end }}

{{- define "specserve.subjects" -}}
- kind: ServiceAccount
  name: {{ include "specserve.serviceAccount" . | quote }}
  namespace: {{ .Release.Namespace | quote }}
{{- end }}
