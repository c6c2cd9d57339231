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
      {{- include "leyden.kedaPostgres" .root | nindent 6 }}
      query: {{ .query | quote }}
      targetQueryValue: {{ .target | quote }}
{{- end -}}
{{- end }}

{{/* KEDA reads the variables of the scaled pods. */}}
{{- define "leyden.kedaPostgres" -}}
{{- $postgres := .Values.postgres -}}
{{- if or (eq $postgres.mode "cnpg") (and (eq $postgres.mode "external") $postgres.external.urlSecret.name) -}}
connectionFromEnv: LEYDEN_DATABASE_URL
{{- else -}}
{{- $parts := include "leyden.databaseParts" . | fromYaml -}}
host: {{ $parts.HOST | quote }}
port: {{ $parts.PORT | quote }}
userName: {{ $parts.USER | quote }}
dbName: {{ $parts.NAME | quote }}
sslmode: {{ regexFind "sslmode=[a-z-]+" ($parts.PARAMETERS | default "") | trimPrefix "sslmode=" | default "prefer" }}
passwordFromEnv: LEYDEN_DATABASE_PASSWORD
{{- end -}}
{{- end }}
