{{/*
Scaling by the length of a queue, which KEDA asks Postgres for with the service's own address and password.
Arguments: root, name, query, target: of the number that the query returns, for each replica.
*/}}
{{- define "leyden.scaledObject" -}}
{{- $keda := (index .root.Values .name).keda -}}
{{- if $keda.enabled -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "leyden.metadata" (dict "root" .root "component" .name) | nindent 2 }}
spec:
  scaleTargetRef:
    name: {{ include "leyden.fullname" .root }}-{{ .name }}
  minReplicaCount: {{ $keda.minReplicas }}
  maxReplicaCount: {{ $keda.maxReplicas }}
  pollingInterval: {{ $keda.pollingInterval }}
  cooldownPeriod: {{ $keda.cooldownPeriod }}
  triggers:
  - type: postgresql
    metadata:
      connectionFromEnv: LEYDEN_DATABASE_URL
      query: {{ .query | quote }}
      targetQueryValue: {{ .target | quote }}
{{- end -}}
{{- end }}
