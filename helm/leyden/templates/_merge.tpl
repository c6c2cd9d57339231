{{/*
One document over another: maps and containers are merged, a variable, volume or mount replaces that of its name, other
lists of objects are joined, and null removes. Arguments: base, over, key under which they stand. JSON with the result
in `value`.
*/}}
{{- define "leyden.merged" -}}
{{- $base := .base -}}
{{- $over := .over -}}
{{- $value := $over -}}
{{- if and (kindIs "map" $base) (kindIs "map" $over) -}}
{{- $value = deepCopy $base -}}
{{- range $key, $part := $over -}}
{{- if kindIs "invalid" $part -}}
{{- $_ := unset $value $key -}}
{{- else if hasKey $base $key -}}
{{- $_ := set $value $key (include "leyden.merged" (dict "base" (index $base $key) "over" $part "key" $key) | fromJson).value -}}
{{- else -}}
{{- $_ := set $value $key $part -}}
{{- end -}}
{{- end -}}
{{- else if and (kindIs "slice" $base) (kindIs "slice" $over) (include "leyden.areObjects" (concat $base $over)) -}}
{{- $value = list -}}
{{- $key := .key -}}
{{- $deep := list "containers" "initContainers" -}}
{{- $names := list -}}
{{- range $one := $base -}}
{{- $name := include "leyden.nameIn" $one -}}
{{- range $other := $over -}}
{{- if and $name (eq (include "leyden.nameIn" $other) $name) -}}
{{- $one = ternary (include "leyden.merged" (dict "base" $one "over" $other) | fromJson).value $other (has $key $deep) -}}
{{- end -}}
{{- end -}}
{{- $names = append $names $name -}}
{{- $value = append $value $one -}}
{{- end -}}
{{- range $other := $over -}}
{{- $name := include "leyden.nameIn" $other -}}
{{- if not (and $name (has $name $names)) -}}
{{- $value = append $value $other -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- dict "value" $value | toJson -}}
{{- end }}

{{/* Something where every item of a list is an object. */}}
{{- define "leyden.areObjects" -}}
{{- $all := true -}}
{{- range . -}}{{- if not (kindIs "map" .) -}}{{- $all = false -}}{{- end -}}{{- end -}}
{{- if $all -}}yes{{- end -}}
{{- end }}

{{/* What tells an item of a list from the others; empty where nothing does. */}}
{{- define "leyden.nameIn" -}}
{{- .mountPath | default .name | default "" -}}
{{- end }}

{{/* A pod of the chart with a `podTemplate` of the values over it. Arguments: pod (YAML), over. */}}
{{- define "leyden.podWith" -}}
{{- (include "leyden.merged" (dict "base" (fromYaml .pod) "over" (.over | default dict)) | fromJson).value | toYaml -}}
{{- end }}
