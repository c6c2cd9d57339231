{{- define "leyden.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (.Values.nameOverride | default "leyden") .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (.Values.nameOverride | default "leyden") | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Namespace of agents: named by namespace and release, for two releases of one name share none. */}}
{{- define "leyden.rolloutsNamespace" -}}
{{- $owner := ternary .Release.Name (printf "%s-%s" .Release.Namespace .Release.Name) (eq .Release.Namespace .Release.Name) -}}
{{- $long := gt (len $owner) 54 -}}
{{- $short := ternary (printf "%s-%s" ($owner | trunc 45) (sha256sum $owner | trunc 8)) $owner $long -}}
{{- .Values.rollouts.namespace | default (printf "%s-rollouts" $short) -}}
{{- end }}

{{/* Selectors are immutable: name, instance and component alone. Arguments: root, component. */}}
{{- define "leyden.selectorLabels" -}}
app.kubernetes.io/name: leyden
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "leyden.labels" -}}
{{ include "leyden.selectorLabels" . }}
app.kubernetes.io/part-of: leyden
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of a Job's pod, which cannot change: without the versions of chart and platform. Arguments: root, component. */}}
{{- define "leyden.jobLabels" -}}
{{ include "leyden.selectorLabels" . }}
app.kubernetes.io/part-of: leyden
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* metadata of an object. Arguments: root, component, optional suffix of the name, namespace, annotations. */}}
{{- define "leyden.metadata" -}}
name: {{ include "leyden.fullname" .root }}{{ with .suffix | default .component }}-{{ . }}{{ end }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "leyden.labels" . | nindent 2 }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Arguments: root, image (repository, tag, digest, registry where it is not that of the others); others: not Leyden's. */}}
{{- define "leyden.image" -}}
{{- $global := .root.Values.global -}}
{{- $registry := .image.registry | default (ternary $global.thirdPartyRegistry $global.imageRegistry (.others | default false)) | default "docker.io" -}}
{{- if .image.digest -}}
{{- printf "%s/%s@%s" $registry .image.repository .image.digest -}}
{{- else -}}
{{- $tag := .image.tag | default .root.Values.imageTag | default .root.Chart.AppVersion -}}
{{- if eq $tag "latest" -}}
{{- fail (printf "%s has the tag latest, which nodes do not pull again: name a version or a digest in its image, or in imageTag" .image.repository) -}}
{{- end -}}
{{- printf "%s/%s:%s" $registry .image.repository $tag -}}
{{- end -}}
{{- end }}

{{- define "leyden.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Arguments: readOnly */}}
{{- define "leyden.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ .readOnly }}
capabilities:
  drop: [ALL]
{{- end }}

{{/* Arguments: root, values. Where pods run. */}}
{{- define "leyden.scheduling" -}}
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
{{- with index $.values $field }}
{{ $field }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* Secrets: of the user, or of the chart. Arguments: root, secret (existingSecret, key), and the key in the chart's Secret. */}}
{{- define "leyden.secretRef" -}}
{{- if .secret.existingSecret -}}
name: {{ .secret.existingSecret }}
key: {{ .secret.key | default .key }}
{{- else -}}
name: {{ include "leyden.fullname" .root }}-secrets
key: {{ .key }}
{{- end -}}
{{- end }}

{{/* A secret's text: the value, that of the installed release, or a random one. Arguments: root, secret, key, length. */}}
{{- define "leyden.secretText" -}}
{{- $installed := (lookup "v1" "Secret" .root.Release.Namespace (printf "%s-secrets" (include "leyden.fullname" .root))).data | default dict -}}
{{- if .secret.value -}}
{{- .secret.value -}}
{{- else if index $installed .key -}}
{{- index $installed .key | b64dec -}}
{{- else -}}
{{- randAlphaNum (.length | int) -}}
{{- end -}}
{{- end }}

{{- define "leyden.postgresHost" -}}
{{- if eq .Values.postgres.mode "external" }}{{ .Values.postgres.external.host }}{{ else }}{{ include "leyden.fullname" . }}-postgres.{{ .Release.Namespace }}.svc{{ end -}}
{{- end }}

{{/* Where Postgres is: the whole address from a Secret, or its parts, of which the password alone is in a Secret. */}}
{{- define "leyden.databaseEnv" -}}
{{- $postgres := .Values.postgres -}}
{{- if eq $postgres.mode "cnpg" -}}
- name: LEYDEN_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "leyden.fullname" . }}-postgres-app
      key: uri
{{- else if and (eq $postgres.mode "external") $postgres.external.urlSecret.name -}}
- name: LEYDEN_DATABASE_URL
  valueFrom:
    secretKeyRef:
      {{- toYaml $postgres.external.urlSecret | nindent 6 }}
{{- else -}}
{{- range $name, $value := include "leyden.databaseParts" . | fromYaml }}
- name: LEYDEN_DATABASE_{{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{ include "leyden.secretEnv" (dict "root" . "variable" "LEYDEN_DATABASE_PASSWORD" "secret" $postgres.password "key" "postgres-password") }}
{{- end }}
{{- if include "leyden.databaseCa" . }}
# Read by libpq.
- name: PGSSLROOTCERT
  value: /etc/leyden/postgres/ca.crt
{{- end }}
{{- end }}

{{/* The certificate authority of an external Postgres, in each pod that connects to it. */}}
{{- define "leyden.databaseCaMount" -}}
{{- if include "leyden.databaseCa" . -}}
- name: postgres-ca
  mountPath: /etc/leyden/postgres
  readOnly: true
{{- end }}
{{- end }}

{{- define "leyden.databaseCaVolume" -}}
{{- with include "leyden.databaseCa" . -}}
- name: postgres-ca
  secret:
    secretName: {{ . }}
    items:
    - key: {{ $.Values.postgres.external.caSecret.key }}
      path: ca.crt
{{- end }}
{{- end }}

{{/* The name of its Secret; empty where there is none. */}}
{{- define "leyden.databaseCa" -}}
{{- if eq .Values.postgres.mode "external" }}{{ .Values.postgres.external.caSecret.name }}{{ end -}}
{{- end }}

{{/* As YAML, by the end of the setting's name. */}}
{{- define "leyden.databaseParts" -}}
{{- $external := .Values.postgres.external -}}
{{- $inside := dict "HOST" (include "leyden.postgresHost" .) "PORT" "5432" "USER" "leyden" "NAME" "leyden" -}}
{{- if eq .Values.postgres.mode "external" -}}
{{- dict "HOST" $external.host "PORT" ($external.port | toString) "USER" $external.user "NAME" $external.database "PARAMETERS" $external.parameters | toYaml -}}
{{- else -}}
{{- toYaml $inside -}}
{{- end -}}
{{- end }}

{{- define "leyden.redisEnv" -}}
{{- $redis := .Values.redis -}}
{{- $external := eq $redis.mode "external" -}}
{{- if and $external $redis.external.urlSecret.name -}}
- name: LEYDEN_REDIS_URL
  valueFrom:
    secretKeyRef:
      {{- toYaml $redis.external.urlSecret | nindent 6 }}
{{- else -}}
- name: LEYDEN_REDIS_HOST
  value: {{ ternary $redis.external.host (printf "%s-redis" (include "leyden.fullname" .)) $external | quote }}
{{- if $external }}
- name: LEYDEN_REDIS_PORT
  value: {{ $redis.external.port | quote }}
- name: LEYDEN_REDIS_NUMBER
  value: {{ $redis.external.number | quote }}
{{- end }}
{{- if or (not $external) $redis.password.existingSecret $redis.password.value }}
{{ include "leyden.secretEnv" (dict "root" . "variable" "LEYDEN_REDIS_PASSWORD" "secret" $redis.password "key" "redis-password") }}
{{- end }}
{{- end }}
{{- end }}

{{/* One variable from a secret. Arguments: root, variable, secret, key. */}}
{{- define "leyden.secretEnv" -}}
- name: {{ .variable }}
  valueFrom:
    secretKeyRef:
      {{- include "leyden.secretRef" . | nindent 6 }}
{{- end }}

{{- define "leyden.commonEnv" -}}
- name: LEYDEN_LOG_LEVEL
  value: {{ .Values.logLevel }}
{{- with .Values.otlpEndpoint }}
- name: LEYDEN_OTLP_ENDPOINT
  value: {{ . }}
{{- end }}
{{- end }}

{{/* Where the internal port listens. Arguments: prefix. */}}
{{- define "leyden.internalEnv" -}}
- name: {{ .prefix }}_INTERNAL_HOST
  value: 0.0.0.0
- name: {{ .prefix }}_INTERNAL_PORT
  value: "9090"
{{- end }}

{{/* The base model's folder, named by what is in it: another model is another folder, and its readers' pods change. */}}
{{- define "leyden.modelPath" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "none" -}}
{{- $model.path -}}
{{- else if eq $model.source "demo" -}}
/var/lib/leyden/models/demo
{{- else -}}
/var/lib/leyden/models/{{ printf "%s@%s" $model.repository $model.revision | replace "/" "--" }}
{{- end -}}
{{- end }}

{{/* Waits until the model is in the storage. Arguments: root, image, mounts (those that the pod's values add, where models
may lie, too), model (a path; the base model without it). The controller puts a run's own models into a trainer's MODEL_PATH,
one a line. */}}
{{- define "leyden.waitForModel" -}}
- name: wait-for-model
  image: {{ .image }}
  imagePullPolicy: {{ .root.Values.imagePullPolicy }}
  command:
  - sh
  - -c
  - |
    printf '%s\n' "$MODEL_PATH" | while IFS= read -r folder; do
      until [ -f "$folder/config.json" ]; do echo "waiting: no model in $folder yet"; sleep 2; done
    done
  env:
  - name: MODEL_PATH
    value: {{ .model | default (include "leyden.modelPath" .root) | quote }}
  resources:
    {{- toYaml .root.Values.initResources | nindent 4 }}
  securityContext:
    {{- include "leyden.containerSecurity" (dict "readOnly" true) | nindent 4 }}
  volumeMounts:
  - name: storage
    mountPath: /var/lib/leyden
    readOnly: true
  {{- with .mounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The store of versions and its client's settings; the credentials come from a Secret or from the pod's identity. */}}
{{- define "leyden.objectStoreEnv" -}}
{{- with .Values.objectStore }}
{{- if .url }}
- name: LEYDEN_WEIGHT_STORE
  value: {{ .url | quote }}
{{- with .endpoint }}
- name: AWS_ENDPOINT_URL
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "leyden.objectStoreSecret" -}}
{{- with .Values.objectStore }}
{{- if and .url .credentialsSecret }}
envFrom:
- secretRef:
    name: {{ .credentialsSecret }}
{{- end }}
{{- end }}
{{- end }}

{{- define "leyden.objectStoreAccount" -}}
{{- with .Values.objectStore }}
{{- if and .url .serviceAccount }}
serviceAccountName: {{ .serviceAccount }}
{{- end }}
{{- end }}
{{- end }}

{{- define "leyden.storageVolume" -}}
- name: storage
  persistentVolumeClaim:
    claimName: {{ .Values.storage.existingClaim | default (printf "%s-storage" (include "leyden.fullname" .)) }}
{{- end }}
