{{/* The arguments of a pool beside `default`, as JSON, without root. Its values lie over those of `engine`. */}}
{{- define "leyden.enginePool" -}}
{{- $pool := index .root.Values.engine.pools .name -}}
{{- $component := printf "engine-%s" .name -}}
{{- $engine := mergeOverwrite (deepCopy (omit .root.Values.engine "pools")) (omit $pool "model" "contextLength" "adapters" "maxAdapterRank" "embeddings") -}}
{{- dict "engine" $engine "name" $component "component" $component "model" $pool.model | toJson -}}
{{- end }}

{{/*
Engines of one model. Arguments of all templates here: root; engine: the values; name: of the StatefulSet and its
Service, after the release's; component: of labels and selectors; model: the path of the model.
*/}}
{{- define "leyden.engineStatefulSet" -}}
{{- if gt (int (.engine.nodes | default 1)) 1 -}}
{{ include "leyden.engineGroups" . }}
{{- else -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  {{- include "leyden.metadata" (dict "root" .root "component" .component "suffix" .name) | nindent 2 }}
spec:
  replicas: {{ .engine.replicas }}
  serviceName: {{ include "leyden.fullname" .root }}-{{ .name }}
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- include "leyden.selectorLabels" . | nindent 6 }}
  template:
    {{- include "leyden.enginePodOf" . | nindent 4 }}
{{- end }}
{{- end }}

{{/*
Engines whose model is split over several nodes. A group starts and ends as one; its leader alone answers requests. The
operator makes a Service of the group's name, which must not be ours.
*/}}
{{- define "leyden.engineGroups" -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  {{- include "leyden.metadata" (dict "root" .root "component" .component "suffix" (printf "%s-group" .name)) | nindent 2 }}
spec:
  replicas: {{ .engine.replicas }}
  startupPolicy: LeaderCreated
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      # A group more would need free GPUs.
      maxUnavailable: 1
      maxSurge: 0
  leaderWorkerTemplate:
    size: {{ .engine.nodes }}
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      {{- include "leyden.enginePodOf" (merge (dict "role" "leader") .) | nindent 6 }}
    workerTemplate:
      {{- include "leyden.enginePodOf" (merge (dict "role" "worker") .) | nindent 6 }}
{{- end }}

{{/* Its EndpointSlices are the controller's list of engines, ready or not. */}}
{{- define "leyden.engineService" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "leyden.metadata" (dict "root" .root "component" .component "suffix" .name) | nindent 2 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "leyden.selectorLabels" . | nindent 4 }}
    {{- if gt (int (.engine.nodes | default 1)) 1 }}
    leyden.dev/engine-role: leader
    {{- end }}
  ports:
  - name: http
    port: 30000
    targetPort: http
    protocol: TCP
{{- end }}

{{/* The pod with the operator's part over it. */}}
{{- define "leyden.enginePodOf" -}}
{{- include "leyden.podWith" (dict "pod" (include "leyden.enginePod" .) "over" .engine.podTemplate) -}}
{{- end }}

{{- define "leyden.enginePod" -}}
{{- $root := .root -}}
{{- $engine := .engine -}}
{{- $cpu := eq $engine.backend "cpu" -}}
{{- $image := include "leyden.image" (dict "root" $root "image" (ternary $engine.cpuImage $engine.image $cpu)) -}}
{{- /* The controller knows the leader of a group alone: its other nodes load from the storage. */ -}}
{{- $fetches := and $root.Values.objectStore.url (not .role) -}}
metadata:
  labels:
    {{- include "leyden.labels" . | nindent 4 }}
    {{- with .role }}
    leyden.dev/engine-role: {{ . }}
    {{- end }}
    {{- with $engine.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Other keys are other pods.
    checksum/keys: {{ printf "%s %s" $root.Values.secrets.engineApiKey.value $root.Values.secrets.engineAdminKey.value | sha256sum }}
    {{- with $engine.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- if $fetches }}
  {{- include "leyden.objectStoreAccount" $root | indent 2 }}
  {{- end }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $engine.terminationGracePeriodSeconds }}
  securityContext:
    {{- include "leyden.podSecurity" $root | nindent 4 }}
  {{- include "leyden.scheduling" (dict "root" $root "values" $engine) | nindent 2 }}
  initContainers:
  {{- if $fetches }}
  {{- include "leyden.fetcher" $root | nindent 2 }}
  {{- end }}
  {{- include "leyden.waitForModel" (dict "root" $root "image" $image "mounts" $engine.extraVolumeMounts "model" .model) | nindent 2 }}
  containers:
  - name: engine
    image: {{ $image }}
    imagePullPolicy: {{ $root.Values.imagePullPolicy }}
    command: [leyden-engine]
    {{- if or .role $engine.extraArgs }}
    args:
      {{- if .role }}
      # The operator sets these variables.
      - --dist-init-addr=$(LWS_LEADER_ADDRESS):20000
      - --nnodes=$(LWS_GROUP_SIZE)
      - --node-rank=$(LWS_WORKER_INDEX)
      {{- end }}
      {{- with $engine.extraArgs }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- end }}
    env:
    {{- include "leyden.commonEnv" $root | nindent 4 }}
    - name: ENGINE_HOST
      value: 0.0.0.0
    - name: ENGINE_PORT
      value: "30000"
    - name: ENGINE_MODEL_PATH
      value: {{ .model | quote }}
    {{- include "leyden.secretEnv" (dict "root" $root "variable" "ENGINE_API_KEY" "secret" $root.Values.secrets.engineApiKey "key" "engine-api-key") | nindent 4 }}
    {{- include "leyden.secretEnv" (dict "root" $root "variable" "ENGINE_ADMIN_API_KEY" "secret" $root.Values.secrets.engineAdminKey "key" "engine-admin-key") | nindent 4 }}
    {{- if $cpu }}
    - name: ENGINE_INCREMENTAL_STREAMING_OUTPUT
      value: "true"
    {{- include "leyden.internalEnv" (dict "prefix" "ENGINE") | nindent 4 }}
    {{- else }}
    - name: ENGINE_TENSOR_PARALLEL
      value: {{ mul $engine.gpus ($engine.nodes | default 1) | quote }}
    {{- end }}
    {{- include "leyden.cacheEnv" $root | nindent 4 }}
    {{- with $engine.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    ports:
    - name: http
      containerPort: 30000
      protocol: TCP
    {{- if $cpu }}
    - name: internal
      containerPort: 9090
      protocol: TCP
    {{- end }}
    {{- if ne (.role | default "leader") "worker" }}
    startupProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: {{ $engine.startupFailureThreshold }}
    readinessProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 5
      timeoutSeconds: 5
    livenessProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 30
      timeoutSeconds: 20
      failureThreshold: 6
    {{- end }}
    resources:
      {{- include "leyden.gpuResources" (dict "root" $root "resources" $engine.resources "gpus" (ternary 0 $engine.gpus $cpu)) | nindent 6 }}
    securityContext:
      # The NVIDIA runtime's hook writes into the root of GPU pods.
      {{- include "leyden.containerSecurity" (dict "readOnly" $cpu) | nindent 6 }}
    volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: shm
      mountPath: /dev/shm
    - name: storage
      mountPath: /var/lib/leyden
      readOnly: true
    {{- if $fetches }}
    - name: versions
      mountPath: /var/cache/leyden
      readOnly: true
    {{- end }}
    {{- with $engine.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ $engine.shmSize }}
  {{- include "leyden.storageVolume" $root | nindent 2 }}
  {{- if $fetches }}
  - name: versions
    {{- toYaml $root.Values.objectStore.cache.volume | nindent 4 }}
  {{- end }}
  {{- with $engine.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
