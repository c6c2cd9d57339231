{{/* The runner adds command, image, variables, labels and the key's Secret to the container `agent`. */}}
{{- define "leyden.agentPod" -}}
metadata:
  labels:
    {{- include "leyden.labels" (dict "root" . "component" "agent") | nindent 4 }}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: 5
  securityContext:
    {{- include "leyden.podSecurity" . | nindent 4 }}
  {{- include "leyden.scheduling" (dict "root" . "values" .Values.rollouts) | nindent 2 }}
  containers:
  - name: agent
    imagePullPolicy: {{ .Values.imagePullPolicy }}
    resources:
      {{- toYaml .Values.rollouts.resources | nindent 6 }}
    securityContext:
      {{- include "leyden.containerSecurity" (dict "readOnly" .Values.rollouts.readOnlyRootFilesystem) | nindent 6 }}
    volumeMounts:
    - name: tmp
      mountPath: /tmp
  volumes:
  - name: tmp
    emptyDir:
      sizeLimit: {{ .Values.rollouts.tmpSize }}
{{- end }}
