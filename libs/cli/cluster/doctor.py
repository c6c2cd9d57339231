"""`leyden doctor --cluster`: what the chart needs of a cluster, and the state of an installed release."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

from leyden.libs.cli.cluster.kubectl import Kubectl, KubectlError, Object
from leyden.libs.cli.errors import Exit
from leyden.libs.cli.view.findings import Finding

OLDEST = (1, 30)
NODES = "/api/v1/nodes"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
DAEMON_SETS = "/apis/apps/v1/daemonsets"
DNS_NAMESPACE = "kube-system"
DNS_PODS = f"/api/v1/namespaces/{DNS_NAMESPACE}/pods?labelSelector=k8s-app%3Dkube-dns"
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
SEVERAL_READERS = re.compile(
    r"nfs|efs\.csi|file\.csi\.azure|filestore|cephfs|longhorn|juicefs|lustre|beegfs|weka|gpfs|glusterfs|portworx|pxd"
)
"""Provisioners that offer ReadWriteMany."""
ONE_READER = re.compile(
    r"ebs\.csi|aws-ebs|pd\.csi|gce-pd|disk\.csi|azure-disk|local-path|rbd|cinder|hostpath|topolvm|lvm"
)
ENFORCING = ("calico", "cilium", "antrea", "kube-router", "weave", "canal", "azure-npm", "anetd", "kindnet", "ovnkube")
"""Parts of the names of DaemonSets whose network plugins enforce NetworkPolicies."""
NOT_ENFORCING = ("flannel",)
BEFORE_START = ("cilium", "anetd")
"""Those that let a pod start once its policies hold; the others may close its network some time later."""
WAITS = "an agent begins once they hold (rollouts.policyWait)"
WITHOUT = (
    "every attempt fails while it waits for them (rollouts.policyWait); without the wait agents would reach every pod"
)
AWS_SWITCH = "--enable-network-policy="
AWS, AWS_MODE = "aws-node", "NETWORK_POLICY_ENFORCING_MODE"
"""The DaemonSet of AWS's plugin, and its variable: `standard` opens a new pod until its policies hold, `strict` closes
it."""
NODE_LOCAL_DNS = "node-local-dns"
KINDS = {
    "": "services configmaps secrets serviceaccounts persistentvolumeclaims",
    "apps": "deployments statefulsets",
    "batch": "jobs",
    "rbac.authorization.k8s.io": "roles rolebindings",
    "networking.k8s.io": "networkpolicies",
    "policy": "poddisruptionbudgets",
    "autoscaling": "horizontalpodautoscalers",
}
"""The chart makes these in its namespace."""
EXTENSIONS = {
    "monitoring.coreos.com": ("Prometheus operator", "monitoring.podMonitor, monitoring.prometheusRule"),
    "postgresql.cnpg.io": ("CloudNativePG", "postgres.mode=cnpg"),
    "keda.sh": ("KEDA", "keda of runner and credit"),
    "leaderworkerset.x-k8s.io": ("LeaderWorkerSet", "a model on several nodes"),
    "kueue.x-k8s.io": ("Kueue", "trainer.kueueQueue"),
    "gateway.networking.k8s.io": ("Gateway API", "api.httpRoute"),
}
ENFORCE = "pod-security.kubernetes.io/enforce"


def examine_cluster(kubectl: Kubectl, namespace: str) -> Iterator[Finding]:
    """Findings about a cluster, before or after an installation into the namespace."""
    try:
        version = kubectl.get("/version")
    except KubectlError as error:
        yield Finding("api server", "problem", str(error), "check `kubectl config get-contexts` and your credentials")
        return
    yield _version(version)
    items = functools.cache(kubectl.items)
    checks: dict[str, Callable[[], Finding]] = {
        "rights": lambda: _rights(kubectl, namespace),
        "nodes": lambda: _nodes(items(NODES)),
        "gpus": lambda: _gpus(items(NODES)),
        "storage classes": lambda: _storage(items(CLASSES)),
        "shared storage": lambda: _shared_storage(items(CLASSES), len(items(NODES))),
        "dns": lambda: _dns(items(DNS_PODS), items(DAEMON_SETS)),
        "network policies": lambda: _network(items(DAEMON_SETS)),
        "pod security": lambda: _pod_security(kubectl, namespace),
        "metrics": lambda: _metrics(kubectl),
    }
    for name, check in checks.items():
        yield _checked(name, check)
    yield from _extensions(kubectl)


def _checked(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except KubectlError as error:
        return Finding(name, "skipped", f"cannot tell: {error}", "ask an administrator of the cluster")


def _version(version: Object) -> Finding:
    text = str(version.get("gitVersion", "unknown"))
    numbers = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if numbers >= OLDEST:
        return Finding("api server", "ok", f"Kubernetes {text}")
    return Finding("api server", "problem", f"Kubernetes {text}", "upgrade it: the chart needs 1.30 or later")


def _rights(kubectl: Kubectl, namespace: str) -> Finding:
    review = _review(kubectl, "SelfSubjectRulesReview", {"namespace": namespace})
    rules = review.get("resourceRules", [])
    wanted = [(group, kind) for group, kinds in KINDS.items() for kind in kinds.split()]
    missing = [(group, kind) for group, kind in wanted if not any(_grants(rule, group, kind) for rule in rules)]
    # A cloud's authorizer may list fewer rules than it grants.
    unsure = [*(missing if review.get("incomplete") else []), ("", "namespaces")]
    refused = [one for one in unsure if not _may_create(kubectl, one, namespace)]
    missing = [one for one in missing if one not in unsure] + refused
    if not missing:
        return Finding("rights", "ok", f"you may create all that the chart makes in {namespace}")
    detail = f"you may not create {', '.join(kind for _, kind in missing)}"
    if missing == [("", "namespaces")]:
        remedy = "ask for a namespace for agents; set rollouts.namespace and rollouts.createNamespace=false"
        return Finding("rights", "warning", detail, remedy)
    return Finding("rights", "problem", detail, f"ask for the ClusterRole `admin` in {namespace}")


def _grants(rule: Object, group: str, kind: str) -> bool:
    parts = (("verbs", "create"), ("apiGroups", group), ("resources", kind))
    return all({word, "*"} & set(rule.get(part) or []) for part, word in parts) and not rule.get("resourceNames")


def _may_create(kubectl: Kubectl, kind: tuple[str, str], namespace: str) -> bool:
    place = {} if kind == ("", "namespaces") else {"namespace": namespace}
    attributes = {"verb": "create", "group": kind[0], "resource": kind[1], **place}
    return bool(_review(kubectl, "SelfSubjectAccessReview", {"resourceAttributes": attributes})["allowed"])


def _review(kubectl: Kubectl, kind: str, spec: Object) -> Object:
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
    made: Object = kubectl.create(f"/apis/authorization.k8s.io/v1/{kind.lower()}s", body)["status"]
    return made


def _nodes(nodes: list[Object]) -> Finding:
    absent = [node["metadata"]["name"] for node in nodes if not _is_ready(node)]
    detail = f"{len(nodes) - len(absent)} of {len(nodes)} can take pods"
    if len(absent) == len(nodes):
        return Finding("nodes", "problem", detail, "see `kubectl describe nodes`: no pod can start")
    if absent:
        return Finding("nodes", "warning", f"{detail}; not {', '.join(absent)}", "see `kubectl describe node`")
    return Finding("nodes", "ok", detail)


def _is_ready(node: Object) -> bool:
    conditions = {one["type"]: one["status"] for one in node.get("status", {}).get("conditions", [])}
    return conditions.get("Ready") == "True" and not node.get("spec", {}).get("unschedulable")


def _gpus(nodes: list[Object]) -> Finding:
    counts: dict[str, list[int]] = {}
    for node in nodes:
        for resource, count in node.get("status", {}).get("allocatable", {}).items():
            if resource.endswith("/gpu") and int(count):
                counts.setdefault(resource, []).append(int(count))
    if not counts:
        remedy = "install the GPU operator or device plugin for engine.backend=sglang; values-dev.yaml needs no GPU"
        return Finding("gpus", "warning", "no node offers any", remedy)
    words = [f"{sum(found)} {resource} on {len(found)} nodes" for resource, found in counts.items()]
    remedy = "" if "nvidia.com/gpu" in counts else f"set global.gpuResource={next(iter(counts))}"
    return Finding("gpus", "warning" if remedy else "ok", ", ".join(words), remedy)


def _storage(classes: list[Object]) -> Finding:
    names = ", ".join(f"{one['metadata']['name']} ({one['provisioner']})" for one in classes)
    if not classes:
        remedy = "install a provisioner, or use storage.existingClaim and postgres.mode=external"
        return Finding("storage classes", "problem", "there is none: claims stay pending", remedy)
    if any(_annotations(one).get(DEFAULT_CLASS) == "true" for one in classes):
        return Finding("storage classes", "ok", names)
    return Finding("storage classes", "warning", f"none is the default: {names}", "set global.storageClass")


def _annotations(one: Object) -> Object:
    return one["metadata"].get("annotations") or {}


def _shared_storage(classes: list[Object], nodes: int) -> Finding:
    name = "shared storage"
    several = [one["metadata"]["name"] for one in classes if SEVERAL_READERS.search(one["provisioner"])]
    if several:
        return Finding(name, "ok", f"ReadWriteMany by {', '.join(several)}")
    remedy = "set storage.storageClass to a class with ReadWriteMany, or storage.existingClaim"
    if nodes == 1:
        local = "one node: storage.accessModes=[ReadWriteOnce] is enough"
        return Finding(name, "ok", local)
    if classes and all(ONE_READER.search(one["provisioner"]) for one in classes):
        detail = "no class offers ReadWriteMany, which trainer and engines on several nodes need"
        return Finding(name, "problem", detail, f"{remedy}; or keep all pods on one node with nodeSelector")
    return Finding(name, "warning", "cannot tell whether a class offers ReadWriteMany", remedy)


def _dns(pods: list[Object], daemon_sets: list[Object]) -> Finding:
    ready = sum(_condition(pod, "Ready") for pod in pods)
    if any(one["metadata"]["name"] == NODE_LOCAL_DNS for one in daemon_sets):
        detail = "NodeLocal DNSCache answers from an address of the node, which the chart's NetworkPolicies close"
        return Finding("dns", "warning", detail, "open it with networkPolicy.extraEgress and rollouts.extraEgress")
    if ready:
        return Finding("dns", "ok", f"{ready} of {len(pods)} pods ready in {DNS_NAMESPACE}")
    if pods:
        return Finding(
            "dns", "problem", "its pods are not ready", f"see `kubectl logs -n {DNS_NAMESPACE} -l k8s-app=kube-dns`"
        )
    detail = f"no pod with k8s-app=kube-dns in {DNS_NAMESPACE}, where the chart's NetworkPolicies allow DNS"
    return Finding(
        "dns", "warning", detail, "open its namespace with networkPolicy.extraEgress and rollouts.extraEgress"
    )


def _condition(pod: Object, kind: str) -> bool:
    found = pod.get("status", {}).get("conditions", [])
    return any(one["type"] == kind and one["status"] == "True" for one in found)


def _network(daemon_sets: list[Object]) -> Finding:
    name, names = "network policies", [one["metadata"]["name"] for one in daemon_sets]
    found = [one for one in names if any(word in one for word in ENFORCING)]
    if found:
        return Finding(name, "ok", f"{', '.join(found)} enforces them, {_moment(found)}")
    if (mode := _aws_mode(daemon_sets)) is not None:
        moment = "before a pod starts" if mode == "strict" else f"perhaps after a pod has started; {WAITS}"
        switch = _aws_switch(daemon_sets)
        if switch == "false":
            detail = f"{AWS} enforces none, as {AWS_SWITCH}false tells it: {WITHOUT}"
            return Finding(name, "warning", detail, "write enableNetworkPolicy=true into the add-on vpc-cni")
        where = "" if switch == "true" else " where they are switched on"
        return Finding(name, "ok", f"{AWS} enforces them{where}, in mode {mode}: {moment}")
    attempt = "install, then connect from an agent's pod to the API: `leyden-api` must time out"
    if any(word in one for one in names for word in NOT_ENFORCING):
        detail = f"flannel does not enforce them: {WITHOUT}"
        return Finding(name, "warning", detail, "add Calico (as Canal) or kube-router for policies")
    return Finding(name, "warning", "cannot tell whether the network plugin enforces them", attempt)


def _moment(plugins: list[str]) -> str:
    if all(any(word in one for word in BEFORE_START) for one in plugins):
        return "before a pod starts"
    return f"perhaps after a pod has started; {WAITS}"


def _aws_switch(daemon_sets: list[Object]) -> str | None:
    """`true` or `false`, as AWS's plugin was told to enforce policies; None where its arguments do not tell."""
    found = [one for one in daemon_sets if one["metadata"]["name"] == AWS]
    pods = [one.get("spec", {}).get("template", {}).get("spec", {}) for one in found]
    words = [word for pod in pods for one in pod.get("containers", []) for word in one.get("args", [])]
    return next((word.removeprefix(AWS_SWITCH) for word in words if word.startswith(AWS_SWITCH)), None)


def _aws_mode(daemon_sets: list[Object]) -> str | None:
    """The mode of AWS's network plugin; None where it is not there."""
    for one in daemon_sets:
        if one["metadata"]["name"] == AWS:
            containers = one.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
            variables = [variable for container in containers for variable in container.get("env", [])]
            return next((str(v.get("value")) for v in variables if v["name"] == AWS_MODE), "standard")
    return None


def _pod_security(kubectl: Kubectl, namespace: str) -> Finding:
    try:
        level = _labels(kubectl.get(f"/api/v1/namespaces/{namespace}")).get(ENFORCE)
    except KubectlError as error:
        if error.status != Exit.NOT_FOUND:
            raise
        return Finding("pod security", "ok", f"{namespace} does not exist yet; all pods meet `restricted`")
    return Finding("pod security", "ok", f"{namespace} enforces {level or 'nothing'}; all pods meet `restricted`")


def _labels(one: Object) -> Object:
    return one["metadata"].get("labels") or {}


def _metrics(kubectl: Kubectl) -> Finding:
    try:
        kubectl.get("/apis/metrics.k8s.io/v1beta1")
    except KubectlError as error:
        if error.status == Exit.NOT_ALLOWED:
            raise
        return Finding("metrics", "warning", "no metrics API", "install metrics-server for <service>.autoscaling")
    return Finding("metrics", "ok", "autoscaling on CPU works")


def _extensions(kubectl: Kubectl) -> Iterator[Finding]:
    try:
        groups = {one["name"] for one in kubectl.get("/apis")["groups"]}
    except KubectlError as error:
        yield Finding("extensions", "skipped", f"cannot tell: {error}")
        return
    for group, (name, values) in EXTENSIONS.items():
        if group in groups:
            yield Finding(name, "ok", "installed")
        else:
            yield Finding(name, "skipped", "not installed", f"only for {values}")
