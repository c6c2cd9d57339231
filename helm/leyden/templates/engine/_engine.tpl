{{/*
Engines of one model. Arguments of all templates here: root; engine: the values; name: of the StatefulSet and its
Service, after the release's; component: of labels and selectors; model: the path of the model.
*/}}
{{- define "leyden.engineStatefulSet" -}}
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
    {{- include "leyden.enginePod" . | nindent 4 }}
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
  ports:
  - name: http
    port: 30000
    targetPort: http
    protocol: TCP
{{- end }}

{{- define "leyden.enginePod" -}}
{{- $root := .root -}}
{{- $engine := .engine -}}
{{- $cpu := eq $engine.backend "cpu" -}}
{{- $image := include "leyden.image" (dict "root" $root "image" (ternary $engine.cpuImage $engine.image $cpu)) -}}
metadata:
  labels:
    {{- include "leyden.labels" . | nindent 4 }}
  {{- with $engine.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $engine.terminationGracePeriodSeconds }}
  securityContext:
    {{- include "leyden.podSecurity" $root | nindent 4 }}
  {{- include "leyden.scheduling" (dict "root" $root "values" $engine) | nindent 2 }}
  initContainers:
  {{- include "leyden.waitForModel" (dict "root" $root "image" $image "model" .model) | nindent 2 }}
  containers:
  - name: engine
    image: {{ $image }}
    imagePullPolicy: {{ $root.Values.imagePullPolicy }}
    command: [leyden-engine]
    {{- with $engine.extraArgs }}
    args:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    env:
    {{- include "leyden.commonEnv" $root | nindent 4 }}
    - name: ENGINE_HOST
      value: 0.0.0.0
    - name: ENGINE_PORT
      value: "30000"
    - name: ENGINE_MODEL_PATH
      value: {{ .model }}
    {{- include "leyden.secretEnv" (dict "root" $root "variable" "ENGINE_API_KEY" "secret" $root.Values.secrets.engineApiKey "key" "engine-api-key") | nindent 4 }}
    {{- include "leyden.secretEnv" (dict "root" $root "variable" "ENGINE_ADMIN_API_KEY" "secret" $root.Values.secrets.engineAdminKey "key" "engine-admin-key") | nindent 4 }}
    {{- if $cpu }}
    - name: ENGINE_INCREMENTAL_STREAMING_OUTPUT
      value: "true"
    {{- include "leyden.internalEnv" (dict "prefix" "ENGINE") | nindent 4 }}
    {{- else }}
    - name: ENGINE_TENSOR_PARALLEL
      value: {{ $engine.gpus | quote }}
    {{- end }}
    {{- include "leyden.cacheEnv" $root | nindent 4 }}
    {{- with $engine.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    ports:
    - name: http
      containerPort: 30000
      protocol: TCP
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
  volumes:
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ $engine.shmSize }}
  {{- include "leyden.storageVolume" $root | nindent 2 }}
{{- end }}
