{{/*
A sidecar of an engine's pod: reads versions from the object store into a folder that the engine reads. It starts before
the engine and ends after it.
*/}}
{{- define "leyden.fetcher" -}}
- name: fetcher
  image: {{ include "leyden.image" (dict "root" . "image" .Values.controller.image) }}
  imagePullPolicy: {{ .Values.imagePullPolicy }}
  restartPolicy: Always
  command: [python, -m, leyden.services.controller.fetcher]
  {{- include "leyden.objectStoreSecret" . | indent 2 }}
  env:
  {{- include "leyden.commonEnv" . | nindent 2 }}
  {{- include "leyden.objectStoreEnv" . | indent 2 }}
  - name: FETCHER_HOST
    value: 0.0.0.0
  - name: FETCHER_PORT
    value: "30001"
  - name: FETCHER_FOLDER
    value: /var/cache/leyden
  - name: FETCHER_FOLDER_BYTES
    value: {{ .Values.objectStore.cache.bytes | int64 | quote }}
  - name: HOME
    value: /tmp
  {{- include "leyden.secretEnv" (dict "root" . "variable" "FETCHER_KEY" "secret" .Values.secrets.engineAdminKey "key" "engine-admin-key") | nindent 2 }}
  ports:
  - name: fetcher
    containerPort: 30001
    protocol: TCP
  resources:
    {{- toYaml .Values.objectStore.resources | nindent 4 }}
  securityContext:
    {{- include "leyden.containerSecurity" (dict "readOnly" true) | nindent 4 }}
  volumeMounts:
  - name: tmp
    mountPath: /tmp
  - name: versions
    mountPath: /var/cache/leyden
{{- end }}
