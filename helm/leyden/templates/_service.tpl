{{/*
The Deployment of a service. Arguments: root, name, env (YAML); port: its HTTP port; ports: further ones (YAML);
account: a service account with rights; versions: whether it uses the object store; component and values: where
they are not the service's; keys: the key ring; storage: `read` for the model, or `write`; templates: the pod
templates.
*/}}
{{- define "leyden.deployment" -}}
{{- $root := .root -}}
{{- $values := .values | default (index $root.Values .name) -}}
{{- $image := include "leyden.image" (dict "root" $root "image" $values.image) -}}
{{- $component := dict "root" $root "component" (.component | default .name) -}}
{{- $code := "/opt/leyden/lib/python3.11/site-packages/leyden" -}}
{{- $sync := and $root.Values.developer.sync (not .component) -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "leyden.metadata" $component | nindent 2 }}
spec:
  {{- if not (or ($values.autoscaling | default dict).enabled ($values.keda | default dict).enabled) }}
  replicas: {{ $values.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "leyden.selectorLabels" $component | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "leyden.labels" $component | nindent 8 }}
        {{- with $values.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        checksum/config: {{ printf "%s %s" (include "leyden.podTemplates" $root) (toYaml (list $root.Values.secrets $root.Values.postgres.password $root.Values.redis.password)) | sha256sum }}
        {{- with $values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      # Named where it is the namespace's own, too: Kubernetes keeps the account of a Deployment that names none any more.
      serviceAccountName: {{ if .account }}{{ include "leyden.fullname" $root }}-{{ .name }}{{ else }}{{ .versions | default false | ternary $root.Values.objectStore.serviceAccount "" | default "default" }}{{ end }}
      automountServiceAccountToken: {{ .account | default false }}
      # Variables that Kubernetes makes of Services have names such as API_PORT, which are settings here.
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds | default 60 }}
      securityContext:
        {{- include "leyden.podSecurity" $root | nindent 8 }}
      {{- include "leyden.scheduling" (dict "root" $root "values" $values) | nindent 6 }}
      {{- if not $values.topologySpreadConstraints }}
      # Replicas on several nodes, where there are several.
      topologySpreadConstraints:
      - maxSkew: 1
        topologyKey: kubernetes.io/hostname
        whenUnsatisfiable: ScheduleAnyway
        labelSelector:
          matchLabels:
            {{- include "leyden.selectorLabels" $component | nindent 12 }}
      {{- end }}
      initContainers:
      - name: wait-for-schema
        image: {{ $image }}
        imagePullPolicy: {{ $root.Values.imagePullPolicy }}
        command: [python, -m, leyden.libs.store.wait, schema]
        terminationMessagePolicy: FallbackToLogsOnError
        env:
        {{- include "leyden.databaseEnv" $root | nindent 8 }}
        resources:
          {{- toYaml $root.Values.initResources | nindent 10 }}
        securityContext:
          {{- include "leyden.containerSecurity" (dict "readOnly" true) | nindent 10 }}
        {{- with include "leyden.databaseCaMount" $root }}
        volumeMounts:
        {{- . | nindent 8 }}
        {{- end }}
      {{- if eq (.storage | default "") "read" }}
      {{- include "leyden.waitForModel" (dict "root" $root "image" $image "mounts" $values.extraVolumeMounts) | nindent 6 }}
      {{- end }}
      {{- if $sync }}
      - name: copy-code
        image: {{ $image }}
        imagePullPolicy: {{ $root.Values.imagePullPolicy }}
        command: [cp, -R, {{ $code }}/., /code]
        resources:
          {{- toYaml $root.Values.initResources | nindent 10 }}
        securityContext:
          {{- include "leyden.containerSecurity" (dict "readOnly" true) | nindent 10 }}
        volumeMounts:
        - name: code
          mountPath: /code
      {{- end }}
      containers:
      - name: {{ .name }}
        image: {{ $image }}
        imagePullPolicy: {{ $root.Values.imagePullPolicy }}
        command: [python, -m, leyden.services.{{ .name }}]
        # A service that refuses its settings names variable and remedy: the pod's status shows its last lines.
        terminationMessagePolicy: FallbackToLogsOnError
        {{- if .versions }}
        {{- include "leyden.objectStoreSecret" $root | indent 8 }}
        {{- end }}
        env:
        {{- include "leyden.commonEnv" $root | nindent 8 }}
        {{- include "leyden.databaseEnv" $root | nindent 8 }}
        {{- include "leyden.redisEnv" $root | nindent 8 }}
        {{- include "leyden.internalEnv" (dict "prefix" (upper .name)) | nindent 8 }}
        {{- if .port }}
        - name: {{ upper .name }}_HOST
          value: 0.0.0.0
        - name: {{ upper .name }}_PORT
          value: {{ .port | quote }}
        {{- end }}
        {{- if .keys }}
        - name: LEYDEN_CAPABILITY_KEYS_FILE
          value: /etc/leyden/keys/capability-keys.json
        {{- end }}
        {{- if .versions }}
        {{- include "leyden.objectStoreEnv" $root | indent 8 }}
        {{- end }}
        {{- with .env }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        ports:
        {{- if .port }}
        - name: http
          containerPort: {{ .port }}
          protocol: TCP
        {{- end }}
        {{- with .ports }}
        {{- . | nindent 8 }}
        {{- end }}
        - name: internal
          containerPort: 9090
          protocol: TCP
        startupProbe:
          httpGet: {path: /healthz, port: internal}
          periodSeconds: 2
          failureThreshold: 90
        readinessProbe:
          httpGet: {path: /readyz, port: internal}
          periodSeconds: 5
          timeoutSeconds: 5
        livenessProbe:
          httpGet: {path: /healthz, port: internal}
          periodSeconds: 15
          timeoutSeconds: 10
          failureThreshold: 4
        lifecycle:
          preStop:
            sleep:
              seconds: {{ $values.preStopSeconds | default 5 }}
        resources:
          {{- toYaml $values.resources | nindent 10 }}
        securityContext:
          {{- include "leyden.containerSecurity" (dict "readOnly" true) | nindent 10 }}
        volumeMounts:
        - name: tmp
          mountPath: /tmp
        {{- with include "leyden.databaseCaMount" $root }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- if $sync }}
        - name: code
          mountPath: {{ $code }}
        {{- end }}
        {{- if .keys }}
        - name: keys
          mountPath: /etc/leyden/keys
          readOnly: true
        {{- end }}
        {{- if .templates }}
        - name: pod-templates
          mountPath: /etc/leyden/pod-templates
          readOnly: true
        {{- end }}
        {{- if .storage }}
        - name: storage
          mountPath: /var/lib/leyden
          readOnly: {{ eq .storage "read" }}
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      volumes:
      - name: tmp
        emptyDir: {}
      {{- with include "leyden.databaseCaVolume" $root }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- if $sync }}
      - name: code
        emptyDir: {}
      {{- end }}
      {{- if .keys }}
      {{- $keys := fromYaml (include "leyden.secretRef" (dict "root" $root "secret" $root.Values.secrets.capabilityKeys "key" "capability-keys.json")) }}
      - name: keys
        secret:
          secretName: {{ $keys.name }}
          # The key ring refuses a file that other users may read.
          defaultMode: 0440
          items:
          - key: {{ $keys.key }}
            path: capability-keys.json
      {{- end }}
      {{- if .templates }}
      - name: pod-templates
        configMap:
          name: {{ include "leyden.fullname" $root }}-pod-templates
      {{- end }}
      {{- if .storage }}
      {{- include "leyden.storageVolume" $root | nindent 6 }}
      {{- end }}
      {{- with $values.extraVolumes }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- end }}

{{/* A Service. Arguments: root, name, ports (YAML). */}}
{{- define "leyden.service" -}}
{{- $values := index .root.Values .name -}}
{{- $component := dict "root" .root "component" .name -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "leyden.metadata" (merge (dict "annotations" (($values.service | default dict).annotations)) $component) | nindent 2 }}
spec:
  type: {{ ($values.service | default dict).type | default "ClusterIP" }}
  selector:
    {{- include "leyden.selectorLabels" $component | nindent 4 }}
  ports:
  {{- .ports | nindent 2 }}
{{- end }}

{{/* Arguments: root, name. Nothing without autoscaling. */}}
{{- define "leyden.hpa" -}}
{{- $values := index .root.Values .name -}}
{{- $scaling := $values.autoscaling | default dict -}}
{{- if $scaling.enabled -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "leyden.metadata" (dict "root" .root "component" .name) | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ include "leyden.fullname" .root }}-{{ .name }}
  minReplicas: {{ $scaling.minReplicas }}
  maxReplicas: {{ $scaling.maxReplicas }}
  metrics:
  - type: Resource
    resource:
      name: cpu
      target:
        type: Utilization
        averageUtilization: {{ $scaling.targetCPUUtilization | default 70 }}
{{- end -}}
{{- end }}

{{/* Arguments: root, name; component and values as above. Nothing for one replica: a budget would forbid to drain its node. */}}
{{- define "leyden.pdb" -}}
{{- $values := .values | default (index .root.Values .name) -}}
{{- $scaling := $values.autoscaling | default dict -}}
{{- $keda := $values.keda | default dict -}}
{{- $fixed := ternary $keda.minReplicas $values.replicas ($keda.enabled | default false) -}}
{{- $fewest := ternary $scaling.minReplicas $fixed ($scaling.enabled | default false) | int -}}
{{- if gt $fewest 1 -}}
{{- $component := dict "root" .root "component" (.component | default .name) -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "leyden.metadata" $component | nindent 2 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "leyden.selectorLabels" $component | nindent 6 }}
{{- end -}}
{{- end }}
