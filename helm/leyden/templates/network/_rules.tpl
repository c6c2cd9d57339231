{{- define "leyden.dnsRule" -}}
- to:
  - namespaceSelector:
      matchLabels:
        kubernetes.io/metadata.name: kube-system
  ports:
  - port: 53
    protocol: UDP
  - port: 53
    protocol: TCP
{{- end }}

{{/* A peer: a component of this release, or `agents`. Arguments: root, peer. */}}
{{- define "leyden.peer" -}}
{{- if eq .peer "agents" -}}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ include "leyden.rolloutsNamespace" .root }}
{{- else -}}
- podSelector:
    matchLabels:
      {{- include "leyden.selectorLabels" (dict "root" .root "component" .peer) | nindent 6 }}
{{- end -}}
{{- end }}

{{/* The port of an HTTP address. */}}
{{- define "leyden.urlPort" -}}
{{- regexFind "^[a-z]+://[^/]*" . | regexFind ":[0-9]+$" | trimPrefix ":" | default (hasPrefix "https:" . | ternary "443" "80") -}}
{{- end }}

{{- define "leyden.portRules" -}}
{{- range . }}
- port: {{ . }}
  protocol: TCP
{{- end }}
{{- end }}
