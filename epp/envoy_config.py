"""Envoy bootstraps from typed Python: what `kvsteer envoy-config` prints and what the files in `envoy/` are.

In: `EnvoyOptions`. Out: an Envoy `Bootstrap` message; `epp.envoy_yaml` renders it. Needs the extra `envoy`
(`envoy-data-plane`: Envoy's API as dataclasses, so that a misspelt field is an error here and not at Envoy's start).

The listener strips steering headers sent by clients, asks the picker over ext_proc, and routes by its answer:

    client -> listener -> early header mutation -> ext_proc (the picker) -> router -> pool (workers)

A pool is *listed* or *unlisted*. Listed, in the configuration or in a file that the picker keeps: the `override_host`
policy takes the picker's ordered list of endpoints, retries walk it, and a round robin over all of them serves when the
picker does not answer, so fail-open works.
Unlisted: an ORIGINAL_DST cluster connects to whatever address the picker names, so workers come and go freely, but
without an answer there is nowhere to go, so only fail-closed is honest.

docs/envoy.md says what goes wrong without each setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import betterproto2
from envoy_data_plane.envoy.config.bootstrap.v3 import (
    Admin,
    Bootstrap,
    BootstrapStaticResources,
    LayeredRuntime,
    RuntimeLayer,
)
from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterEdsClusterConfig,
    ClusterLbPolicy,
    ClusterOriginalDstLbConfig,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as HeaderMutationEntry
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    ConfigSource,
    DataSource,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    Node,
    PathConfigSource,
    Pipe,
    SocketAddress,
    TransportSocket,
    TypedExtensionConfig,
    WatchedDirectory,
)
from envoy_data_plane.envoy.config.core.v3 import HttpProtocolOptions as CommonHttpProtocolOptions
from envoy_data_plane.envoy.config.core.v3 import RetryPolicy as GrpcRetryPolicy
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.overload.v3 import OverloadManager, ResourceMonitor
from envoy_data_plane.envoy.config.route.v3 import (
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryHostPredicate,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    RouteMatchGrpcRouteMatchOptions,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata.v3 import (
    Config as HeaderToMetadata,
)
from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata.v3 import (
    ConfigKeyValuePair,
    ConfigRule,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerServerHeaderTransformation,
    HttpConnectionManagerUpgradeConfig,
    HttpFilter,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import HeaderMutation
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import DownstreamConnectionsConfig
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatchAndSubstitute, RegexMatcher
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import HttpStatus, Percent, StatusCode
from envoy_data_plane.google.protobuf import Any as ProtoAny
from envoy_data_plane.google.protobuf import Struct, Value

from epp.discovery.envoy_file import ENVOY_POOL
from epp.envoy_options import (
    EndpointsFile,
    EnvoyOptions,
    FailureMode,
    HostPort,
    PickerAddress,
    Profile,
    UnixSocket,
    is_ip,
)

DESTINATION = "x-gateway-destination-endpoint"
LB_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
CONTROL_HEADERS = (
    DESTINATION,
    f"{DESTINATION}-subset",
    f"{DESTINATION}-served",
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
    "x-data-parallel-rank",
)
"""Headers by which this project and its neighbours steer; obeyed only when the picker wrote them."""

EXT_PROC_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
PICKER_CLUSTER, POOL_CLUSTER, GRPC_POOL_CLUSTER = "picker", "pool", "pool_grpc"

BODY_LIMIT_BYTES = 32 << 20
UNLIMITED = 100_000
"""A circuit breaker that never trips before memory does; Envoy's default is 1,024."""
MAX_CONNECTIONS = 50_000
CONNECT_TIMEOUT = timedelta(seconds=1)
MESSAGE_TIMEOUT = timedelta(seconds=10)
PREFILL_TIMEOUT = timedelta(hours=1)
"""The sidecar holds a request for its prefill legs and limits those itself."""
STREAM_IDLE_TIMEOUT = timedelta(hours=1)
WORKER_IDLE_TIMEOUT = timedelta(seconds=4)
"""Shorter than uvicorn's keep-alive of 5 s, so that Envoy, not the worker, closes an idle connection."""
HEALTH_INTERVAL = timedelta(seconds=1)
RETRIES = 2

_FIRST_NAMESPACE, _FIRST_KEY = "kvsteer", "destination"
"""Where the first address of the picker's list is put for ORIGINAL_DST."""


def bootstrap(options: EnvoyOptions) -> Bootstrap:
    """The whole configuration of one Envoy."""
    return Bootstrap(
        # Envoy asks for nothing by file, either, before it has a name.
        node=Node(id="kvsteer", cluster="kvsteer") if isinstance(options.endpoints, EndpointsFile) else None,
        admin=Admin(address=_address(options.admin)),
        layered_runtime=LayeredRuntime(
            layers=[
                RuntimeLayer(
                    name="static",
                    static_layer=Struct(
                        fields={"envoy.reloadable_features.ext_proc_graceful_grpc_close": Value(bool_value=True)}
                    ),
                )
            ]
        ),
        overload_manager=OverloadManager(
            resource_monitors=[
                ResourceMonitor(
                    name="envoy.resource_monitors.global_downstream_max_connections",
                    typed_config=_any(DownstreamConnectionsConfig(max_active_downstream_connections=MAX_CONNECTIONS)),
                )
            ]
        ),
        static_resources=BootstrapStaticResources(
            listeners=[_listener(options)],
            clusters=[
                _picker_cluster(options),
                _pool_cluster(options, POOL_CLUSTER, http2=False),
                _pool_cluster(options, GRPC_POOL_CLUSTER, http2=True),
            ],
        ),
    )


def _listener(options: EnvoyOptions) -> Listener:
    manager = HttpConnectionManager(
        stat_prefix="gateway",
        use_remote_address=True,
        preserve_external_request_id=True,
        normalize_path=True,
        server_header_transformation=HttpConnectionManagerServerHeaderTransformation.PASS_THROUGH,
        stream_idle_timeout=STREAM_IDLE_TIMEOUT,
        request_headers_timeout=timedelta(seconds=30),
        http_protocol_options=Http1ProtocolOptions(enable_trailers=True),
        early_header_mutation_extensions=[
            _extension(
                "envoy.http.early_header_mutation.header_mutation",
                HeaderMutation(mutations=[HeaderMutationEntry(remove=name) for name in _not_taken(options)]),
            )
        ],
        route_config=RouteConfiguration(
            virtual_hosts=[
                VirtualHost(
                    name="all",
                    domains=["*"],
                    request_body_buffer_limit=BODY_LIMIT_BYTES,
                    response_headers_to_add=_told_header(options),
                    routes=_routes(options),
                )
            ]
        ),
        http_filters=_http_filters(options, _mode_of(options.profile), observe=options.usage),
        # A websocket has no end of body to wait for: pick on its headers.
        upgrade_configs=[
            HttpConnectionManagerUpgradeConfig(
                upgrade_type="websocket", filters=_http_filters(options, _HEADERS_ONLY, observe=False)
            )
        ],
    )
    return Listener(
        name="gateway",
        address=_address(options.listen),
        per_connection_buffer_limit_bytes=BODY_LIMIT_BYTES,
        filter_chains=[
            FilterChain(
                filters=[Filter(name="envoy.filters.network.http_connection_manager", typed_config=_any(manager))]
            )
        ],
    )


def _not_taken(options: EnvoyOptions) -> Sequence[str]:
    """What a client may not set. Beside a decode worker the client is the gateway, which says who prefills."""
    return [name for name in CONTROL_HEADERS if not options.decode or name.startswith(DESTINATION)]


def _routes(options: EnvoyOptions) -> list[Route]:
    """To the pool, gRPC over HTTP/2, the rest over HTTP/1.1, with retries where those are safe."""

    def route(match: RouteMatch, cluster: str, *, retry: bool = True) -> Route:
        # A hand-over is fetched once: the decode leg is not sent a second time.
        policy = _retry_policy(options) if retry and not options.decode else None
        return Route(match=match, route=RouteAction(cluster=cluster, timeout=timedelta(0), retry_policy=policy))

    routes = [
        route(RouteMatch(prefix="/", grpc=RouteMatchGrpcRouteMatchOptions()), GRPC_POOL_CLUSTER),
        route(RouteMatch(prefix="/"), POOL_CLUSTER),
    ]
    if options.profile is Profile.GATEWAY:
        # Envoy sends a full-duplex body that ends by trailers twice where a retry policy applies (envoy issue 45470).
        trailers = RouteMatch(prefix="/", headers=[HeaderMatcher(name="trailer", present_match=True)])
        routes.insert(0, route(trailers, POOL_CLUSTER, retry=False))
    return routes


_SEND, _SKIP = ProcessingModeHeaderSendMode.SEND, ProcessingModeHeaderSendMode.SKIP
_HEADERS_ONLY = ProcessingMode(
    request_header_mode=_SEND,
    request_body_mode=ProcessingModeBodySendMode.NONE,
    request_trailer_mode=_SKIP,
    response_header_mode=_SKIP,
    response_body_mode=ProcessingModeBodySendMode.NONE,
    response_trailer_mode=_SKIP,
)


def _mode_of(profile: Profile) -> ProcessingMode:
    if profile is Profile.GATEWAY:
        return ProcessingMode(
            request_header_mode=_SEND,
            request_body_mode=ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED,
            request_trailer_mode=_SEND,
            response_header_mode=_SEND,
            response_body_mode=ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED,
            response_trailer_mode=_SEND,
        )
    return ProcessingMode(
        request_header_mode=_SEND,
        request_body_mode=ProcessingModeBodySendMode.BUFFERED,
        request_trailer_mode=_SKIP,
        response_header_mode=_SKIP,
        response_body_mode=ProcessingModeBodySendMode.NONE,
        response_trailer_mode=_SKIP,
    )


def _http_filters(options: EnvoyOptions, mode: ProcessingMode, *, observe: bool) -> list[HttpFilter]:
    picker = ExternalProcessor(
        grpc_service=_picker_service(),
        failure_mode_allow=options.failure_mode is FailureMode.OPEN,
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        message_timeout=PREFILL_TIMEOUT if options.decode else MESSAGE_TIMEOUT,
        metadata_options=MetadataOptions(
            receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE]),
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE, SUBSET_NAMESPACE]),
        ),
        processing_mode=mode,
    )
    filters = [HttpFilter(name="envoy.filters.http.ext_proc", typed_config=_any(picker))]
    if observe:
        filters.append(HttpFilter(name="kvsteer.observe_response", typed_config=_any(_observer())))
    if not options.endpoints:
        filters.append(HttpFilter(name="envoy.filters.http.header_to_metadata", typed_config=_any(_first_of_list())))
    router = Router(suppress_envoy_headers=True)
    filters.append(HttpFilter(name="envoy.filters.http.router", typed_config=_any(router)))
    return filters


def _picker_service() -> GrpcService:
    """A replica of the picker that cannot be reached, or that drains, is passed over for another one."""
    again = GrpcRetryPolicy(retry_on="connect-failure,refused-stream", num_retries=RETRIES)
    return GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=PICKER_CLUSTER), retry_policy=again)


def _observer() -> ExternalProcessor:
    return ExternalProcessor(
        grpc_service=_picker_service(),
        failure_mode_allow=True,
        observability_mode=True,
        processing_mode=ProcessingMode(
            request_header_mode=_SEND,
            request_body_mode=ProcessingModeBodySendMode.NONE,
            request_trailer_mode=_SKIP,
            response_header_mode=_SEND,
            response_body_mode=ProcessingModeBodySendMode.STREAMED,
            response_trailer_mode=_SKIP,
        ),
        metadata_options=MetadataOptions(
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE])
        ),
    )


def _first_of_list() -> HeaderToMetadata:
    """ORIGINAL_DST takes one address: hand it the first of the picker's ordered list."""
    return HeaderToMetadata(
        request_rules=[
            ConfigRule(
                header=DESTINATION,
                on_header_present=ConfigKeyValuePair(
                    metadata_namespace=_FIRST_NAMESPACE,
                    key=_FIRST_KEY,
                    regex_value_rewrite=RegexMatchAndSubstitute(
                        pattern=RegexMatcher(regex=r"^\s*([^,\s]+).*$"), substitution=r"\1"
                    ),
                ),
            )
        ]
    )


def _told_header(options: EnvoyOptions) -> list[HeaderValueOption]:
    """Without a response phase what the client is told reaches it through the metadata that came with the pick."""
    if options.profile is Profile.GATEWAY:
        return []
    name = "x-kvsteer-disaggregation" if options.decode else "x-session-token"
    return [
        HeaderValueOption(
            header=HeaderValue(key=name, value=f"%DYNAMIC_METADATA({LB_NAMESPACE}:{name})%"),
            append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
        )
    ]


def _retry_policy(options: EnvoyOptions) -> RetryPolicy:
    """Only what no worker has begun to answer is tried again; on a listed pool at the next host of the pick."""
    policy = RetryPolicy(retry_on="connect-failure,refused-stream,reset-before-request", num_retries=RETRIES)
    if options.endpoints:
        policy.host_selection_retry_max_attempts = 5
        policy.retry_host_predicate = [
            RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts", typed_config=_any(PreviousHostsPredicate())
            )
        ]
    return policy


def _picker_cluster(options: EnvoyOptions) -> Cluster:
    by_name = isinstance(options.picker, HostPort) and not is_ip(options.picker.host)
    cluster = Cluster(
        name=PICKER_CLUSTER,
        type=ClusterDiscoveryType.STRICT_DNS if by_name else ClusterDiscoveryType.STATIC,
        connect_timeout=CONNECT_TIMEOUT,
        per_connection_buffer_limit_bytes=BODY_LIMIT_BYTES,
        circuit_breakers=_circuit_breakers(),
        common_lb_config=ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0)),
        health_checks=[
            HealthCheck(
                timeout=timedelta(seconds=1),
                interval=HEALTH_INTERVAL,
                no_traffic_interval=HEALTH_INTERVAL,
                unhealthy_threshold=2,
                healthy_threshold=1,
                grpc_health_check=HealthCheckGrpcHealthCheck(service_name=EXT_PROC_SERVICE),
            )
        ],
        load_assignment=_load_assignment(PICKER_CLUSTER, [options.picker]),
        typed_extension_protocol_options=_http_options(
            HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=Http2ProtocolOptions())
        ),
    )
    if options.picker_tls:
        validation = CertificateValidationContext()
        if options.picker_ca:
            validation.trusted_ca = DataSource(filename=options.picker_ca)
        cluster.transport_socket = TransportSocket(
            name="envoy.transport_sockets.tls",
            typed_config=_any(
                UpstreamTlsContext(
                    sni=options.picker.host if isinstance(options.picker, HostPort) and by_name else "",
                    common_tls_context=CommonTlsContext(alpn_protocols=["h2"], validation_context=validation),
                )
            ),
        )
    return cluster


def _pool_cluster(options: EnvoyOptions, name: str, *, http2: bool) -> Cluster:
    protocol = (
        HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=Http2ProtocolOptions())
        if http2
        else HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions(enable_trailers=True))
    )
    cluster = Cluster(
        name=name,
        connect_timeout=CONNECT_TIMEOUT,
        circuit_breakers=_circuit_breakers(),
        typed_extension_protocol_options=_http_options(protocol, idle_timeout=WORKER_IDLE_TIMEOUT),
    )
    if isinstance(options.endpoints, EndpointsFile):
        path = options.endpoints.path
        source = PathConfigSource(path=path, watched_directory=WatchedDirectory(path=path.rpartition("/")[0] or "/"))
        cluster.type = ClusterDiscoveryType.EDS
        cluster.eds_cluster_config = ClusterEdsClusterConfig(
            service_name=ENVOY_POOL, eds_config=ConfigSource(path_config_source=source)
        )
        cluster.load_balancing_policy = _override_host()
    elif options.endpoints:
        cluster.type = ClusterDiscoveryType.STATIC
        cluster.load_assignment = _load_assignment(name, options.endpoints)
        cluster.load_balancing_policy = _override_host()
    else:
        cluster.type = ClusterDiscoveryType.ORIGINAL_DST
        cluster.lb_policy = ClusterLbPolicy.CLUSTER_PROVIDED
        cluster.original_dst_lb_config = ClusterOriginalDstLbConfig(
            metadata_key=_metadata_key(_FIRST_NAMESPACE, _FIRST_KEY)
        )
    return cluster


def _override_host() -> LoadBalancingPolicy:
    return _policy(
        "envoy.load_balancing_policies.override_host",
        OverrideHost(
            override_host_sources=[
                OverrideHostOverrideHostSource(metadata=_metadata_key(LB_NAMESPACE, DESTINATION)),
                OverrideHostOverrideHostSource(header=DESTINATION),
            ],
            selected_host_key=_metadata_key(LB_NAMESPACE, f"{DESTINATION}-served"),
            fallback_policy=_policy("envoy.load_balancing_policies.round_robin", RoundRobin()),
        ),
    )


def _metadata_key(namespace: str, name: str) -> MetadataKey:
    return MetadataKey(key=namespace, path=[MetadataKeyPathSegment(key=name)])


def _policy(name: str, config: betterproto2.Message) -> LoadBalancingPolicy:
    return LoadBalancingPolicy(policies=[LoadBalancingPolicyPolicy(typed_extension_config=_extension(name, config))])


def _circuit_breakers() -> CircuitBreakers:
    return CircuitBreakers(
        thresholds=[
            CircuitBreakersThresholds(
                max_connections=UNLIMITED,
                max_pending_requests=UNLIMITED,
                max_requests=UNLIMITED,
                max_retries=UNLIMITED,
            )
        ]
    )


def _http_options(
    protocol: HttpProtocolOptionsExplicitHttpConfig, *, idle_timeout: timedelta | None = None
) -> dict[str, ProtoAny]:
    options = HttpProtocolOptions(explicit_http_config=protocol)
    if idle_timeout is not None:
        options.common_http_protocol_options = CommonHttpProtocolOptions(idle_timeout=idle_timeout)
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": _any(options)}


def _load_assignment(cluster: str, addresses: Sequence[PickerAddress]) -> ClusterLoadAssignment:
    return ClusterLoadAssignment(
        cluster_name=cluster,
        endpoints=[
            LocalityLbEndpoints(
                lb_endpoints=[LbEndpoint(endpoint=Endpoint(address=_address(address))) for address in addresses]
            )
        ],
    )


def _address(address: PickerAddress) -> Address:
    if isinstance(address, UnixSocket):
        return Address(pipe=Pipe(path=address.path))
    return Address(socket_address=SocketAddress(address=address.host, port_value=address.port))


def _extension(name: str, config: betterproto2.Message) -> TypedExtensionConfig:
    return TypedExtensionConfig(name=name, typed_config=_any(config))


def _any(message: betterproto2.Message) -> ProtoAny:
    return ProtoAny.pack(message)
