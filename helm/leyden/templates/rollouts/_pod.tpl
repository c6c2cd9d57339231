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
  {{- with include "leyden.waitForPolicies" (dict "root" . "component" "agent") }}
  initContainers:
  {{- . | nindent 2 }}
  {{- end }}
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
    - name: var-tmp
      mountPath: /var/tmp
    - name: shm
      mountPath: /dev/shm
  volumes:
  - name: tmp
    emptyDir:
      sizeLimit: {{ .Values.rollouts.tmpSize }}
  - name: var-tmp
    emptyDir:
      sizeLimit: {{ .Values.rollouts.tmpSize }}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.rollouts.shmSize }}
{{- end }}

{{/* Empty where there is nothing to wait for. Pods of the component `verifier` reach no gateway. Arguments: root, component */}}
{{- define "leyden.waitForPolicies" -}}
{{- $component := .component -}}
{{- with .root -}}
{{- if and .Values.networkPolicy.enabled (gt (int .Values.rollouts.policyWait.seconds) 0) -}}
# Some network plugins close a pod's network only after it has started.
- name: wait-for-policies
  image: {{ include "leyden.image" (dict "root" . "image" .Values.runner.image) }}
  imagePullPolicy: {{ .Values.imagePullPolicy }}
  command: [python, -m, leyden.services.runner.backends.kubernetes.wait_for_policies]
  env:
  {{- if ne $component "verifier" }}
  - name: POLICY_GATEWAY
    value: {{ include "leyden.fullname" . }}-gateway.{{ .Release.Namespace }}.svc:8001
  {{- end }}
  - name: POLICY_SECONDS
    value: {{ .Values.rollouts.policyWait.seconds | quote }}
  {{- with .Values.rollouts.policyWait.canary }}
  - name: POLICY_CANARY
    value: {{ . | quote }}
  {{- end }}
  resources:
    {{- toYaml .Values.initResources | nindent 4 }}
  securityContext:
    {{- include "leyden.containerSecurity" (dict "readOnly" true) | nindent 4 }}
{{- end }}
{{- end }}
{{- end }}

{{/* A pod of several attempts: the server from Leyden's image runs in the agents' image, and gives each attempt a user. */}}
{{- define "leyden.sharedPod" -}}
metadata:
  labels:
    {{- include "leyden.labels" (dict "root" . "component" "agents") | nindent 4 }}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: 5
  securityContext:
    seccompProfile:
      type: RuntimeDefault
  {{- include "leyden.scheduling" (dict "root" . "values" .Values.rollouts) | nindent 2 }}
  initContainers:
  {{- include "leyden.waitForPolicies" (dict "root" . "component" "agents") | nindent 2 }}
  - name: server
    image: {{ include "leyden.image" (dict "root" . "image" .Values.runner.image) }}
    imagePullPolicy: {{ .Values.imagePullPolicy }}
    command: [python, -m, leyden.libs.sandbox.pod_server, /opt/leyden-server]
    resources:
      {{- toYaml .Values.initResources | nindent 6 }}
    securityContext:
      runAsNonRoot: true
      {{- include "leyden.containerSecurity" (dict "readOnly" true) | nindent 6 }}
    volumeMounts:
    - name: server
      mountPath: /opt/leyden-server
  containers:
  - name: agent
    imagePullPolicy: {{ .Values.imagePullPolicy }}
    resources:
      {{- toYaml .Values.rollouts.resources | nindent 6 }}
    securityContext:
      runAsUser: 0
      runAsGroup: 0
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: {{ .Values.rollouts.readOnlyRootFilesystem }}
      capabilities:
        drop: [ALL]
        add: [CHOWN, KILL, SETGID, SETUID]
    volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: var-tmp
      mountPath: /var/tmp
    - name: shm
      mountPath: /dev/shm
    - name: attempts
      mountPath: /var/run/leyden-attempts
    - name: server
      mountPath: /opt/leyden-server
      readOnly: true
  volumes:
  - name: tmp
    emptyDir:
      sizeLimit: {{ .Values.rollouts.tmpSize }}
  - name: var-tmp
    emptyDir:
      sizeLimit: {{ .Values.rollouts.tmpSize }}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.rollouts.shmSize }}
  - name: attempts
    emptyDir:
      {{- $number := regexFind "^[0-9.]+" .Values.rollouts.tmpSize }}
      {{- $all := regexReplaceAll "\\.?0+$" (mulf (float64 $number) .Values.rollouts.attemptsPerPod | printf "%.3f") "" }}
      sizeLimit: {{ $all }}{{ trimPrefix $number .Values.rollouts.tmpSize }}
  - name: server
    emptyDir:
      sizeLimit: 16Mi
{{- end }}

{{/* The bounds on the pods of runs, as JSON for runner and API. */}}
{{- define "leyden.agentRules" -}}
{{ merge (dict "attempts_per_pod" (int .Values.rollouts.attemptsPerPod)) .Values.rollouts.allow | toJson }}
{{- end }}
