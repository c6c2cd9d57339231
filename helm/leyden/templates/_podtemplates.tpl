{{/* The pods that runner, controller and grader make Jobs of; values lie over any part. */}}
{{- define "leyden.podTemplates" -}}
{{- $parts := dict "agent" "rollouts" "trainer" "trainer" }}
{{- if .Values.grader.containers.enabled }}{{ $_ := set $parts "verifier" "grader" }}{{ end }}
{{- if gt (int .Values.rollouts.attemptsPerPod) 1 }}{{ $_ := set $parts "shared" "rollouts" }}{{ end }}
{{- range $key, $part := $parts }}
{{ $key }}.yaml: |
  {{- include "leyden.podWith" (dict "pod" (include (printf "leyden.%sPod" $key) $) "over" (index $.Values $part "podTemplate")) | nindent 2 }}
{{- end }}
{{- end }}
