{{/* The controller adds command, rendezvous variables and labels to the container `trainer`. */}}
{{- define "leyden.trainerPod" -}}
{{- $trainer := .Values.trainer -}}
{{- $image := include "leyden.image" (dict "root" . "image" $trainer.image) -}}
metadata:
  labels:
    {{- include "leyden.labels" (dict "root" . "component" "trainer") | nindent 4 }}
    {{- with $trainer.kueueQueue }}
    # The controller copies it to the Job, where Kueue finds it.
    kueue.x-k8s.io/queue-name: {{ . }}
    {{- end }}
    {{- with $trainer.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $trainer.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  {{- include "leyden.objectStoreAccount" . | indent 2 }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $trainer.terminationGracePeriodSeconds }}
  securityContext:
    {{- include "leyden.podSecurity" . | nindent 4 }}
  {{- include "leyden.scheduling" (dict "root" . "values" $trainer) | nindent 2 }}
  initContainers:
  {{- include "leyden.waitForModel" (dict "root" . "image" $image "mounts" $trainer.extraVolumeMounts) | nindent 2 }}
  containers:
  - name: trainer
    image: {{ $image }}
    imagePullPolicy: {{ .Values.imagePullPolicy }}
    {{- include "leyden.objectStoreSecret" . | indent 4 }}
    env:
    {{- include "leyden.commonEnv" . | nindent 4 }}
    {{- include "leyden.databaseEnv" . | nindent 4 }}
    {{- include "leyden.redisEnv" . | nindent 4 }}
    {{- include "leyden.internalEnv" (dict "prefix" "TRAINER") | nindent 4 }}
    {{- include "leyden.objectStoreEnv" . | indent 4 }}
    - name: TRAINER_FOLDER
      value: /var/lib/leyden/weights
    - name: TRAINER_MODEL_PATH
      value: {{ include "leyden.modelPath" . | quote }}
    - name: TRAINER_DEVICE
      value: {{ ternary "auto" "cpu" (gt (int $trainer.gpusPerNode) 0) }}
    - name: PET_NPROC_PER_NODE
      value: {{ max 1 (int $trainer.gpusPerNode) | quote }}
    - name: TRAINER_COPIES
      value: {{ $trainer.copies | quote }}
    {{- include "leyden.cacheEnv" . | nindent 4 }}
    {{- with $trainer.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    ports:
    - name: internal
      containerPort: 9090
      protocol: TCP
    resources:
      {{- include "leyden.gpuResources" (dict "root" . "resources" $trainer.resources "gpus" $trainer.gpusPerNode) | nindent 6 }}
    securityContext:
      # The NVIDIA runtime's hook writes into the root of GPU pods.
      {{- include "leyden.containerSecurity" (dict "readOnly" (eq (int $trainer.gpusPerNode) 0)) | nindent 6 }}
    volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: shm
      mountPath: /dev/shm
    - name: storage
      mountPath: /var/lib/leyden
    {{- with include "leyden.databaseCaMount" . }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $trainer.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ $trainer.shmSize }}
  {{- include "leyden.storageVolume" . | nindent 2 }}
  {{- with include "leyden.databaseCaVolume" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $trainer.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Writable places of caches; without them kernels' compilers write to the root. */}}
{{- define "leyden.cacheEnv" -}}
{{- range $variable, $folder := dict "HOME" "" "XDG_CACHE_HOME" "/cache" "HF_HOME" "/huggingface" "TRITON_CACHE_DIR" "/triton" "TORCHINDUCTOR_CACHE_DIR" "/inductor" "FLASHINFER_WORKSPACE_BASE" "" }}
- name: {{ $variable }}
  value: /tmp{{ $folder }}
{{- end }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}

{{/* Arguments: root, resources, gpus. */}}
{{- define "leyden.gpuResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpus) 0 -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict .root.Values.global.gpuResource (int .gpus))) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}
