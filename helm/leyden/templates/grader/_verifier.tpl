{{/* The grader adds image, command and files. `collect` begins once `verifier` has ended, and reports its verdict. */}}
{{- define "leyden.verifierPod" -}}
{{- $image := include "leyden.image" (dict "root" . "image" .Values.grader.image) -}}
{{- $values := .Values.grader.containers -}}
metadata:
  labels:
    {{- include "leyden.labels" (dict "root" . "component" "verifier") | nindent 4 }}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: 5
  securityContext:
    {{- include "leyden.podSecurity" . | nindent 4 }}
  {{- include "leyden.scheduling" (dict "root" . "values" $values) | nindent 2 }}
  initContainers:
  {{- include "leyden.waitForPolicies" (dict "root" . "component" "verifier") | nindent 2 }}
  - name: unpack
    image: {{ $image }}
    imagePullPolicy: {{ .Values.imagePullPolicy }}
    resources:
      {{- toYaml .Values.initResources | nindent 6 }}
    securityContext:
      {{- include "leyden.containerSecurity" (dict "readOnly" true) | nindent 6 }}
  - name: verifier
    imagePullPolicy: {{ .Values.imagePullPolicy }}
    resources:
      {{- toYaml $values.resources | nindent 6 }}
    securityContext:
      {{- include "leyden.containerSecurity" (dict "readOnly" $values.readOnlyRootFilesystem) | nindent 6 }}
    volumeMounts:
    - name: tmp
      mountPath: /tmp
  containers:
  - name: collect
    image: {{ $image }}
    imagePullPolicy: {{ .Values.imagePullPolicy }}
    resources:
      {{- toYaml .Values.initResources | nindent 6 }}
    securityContext:
      {{- include "leyden.containerSecurity" (dict "readOnly" true) | nindent 6 }}
  volumes:
  - name: tmp
    emptyDir:
      sizeLimit: {{ $values.tmpSize }}
{{- end }}
