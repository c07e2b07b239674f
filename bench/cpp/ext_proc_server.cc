// An ext_proc server that does nothing: what gRPC in C++ costs by itself, to hold a picker in any language against.
//
// Callback API, as gRPC recommends it. Each message is answered at once: headers with a destination (round robin over
// the endpoints given), bodies unchanged (full duplex: sent back whole), trailers as they are.
//
// usage: ext_proc_server LISTEN ENDPOINT...      LISTEN is ip:port or unix:/path
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <atomic>
#include <cstdio>
#include <string>
#include <vector>

#include "ext_proc.grpc.pb.h"

namespace ext_proc = envoy::service::ext_proc::v3;

namespace {

const char kDestination[] = "x-gateway-destination-endpoint";
std::vector<std::string> endpoints;
std::atomic<unsigned> turn{0};

class Stream : public grpc::ServerBidiReactor<ext_proc::ProcessingRequest, ext_proc::ProcessingResponse> {
 public:
  Stream() { StartRead(&request_); }

  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    Answer();
    StartWrite(&response_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    StartRead(&request_);
  }

  void OnDone() override { delete this; }

 private:
  void Answer() {
    response_.Clear();
    if (request_.has_protocol_config()) {
      using Mode = ext_proc::ProcessingMode;
      duplex_ = request_.protocol_config().request_body_mode() == Mode::FULL_DUPLEX_STREAMED;
    }
    switch (request_.request_case()) {
      case ext_proc::ProcessingRequest::kRequestHeaders: {
        auto* common = response_.mutable_request_headers()->mutable_response();
        auto* header = common->mutable_header_mutation()->add_set_headers()->mutable_header();
        header->set_key(kDestination);
        header->set_raw_value(endpoints[turn++ % endpoints.size()]);
        break;
      }
      case ext_proc::ProcessingRequest::kResponseHeaders:
        response_.mutable_response_headers();
        break;
      case ext_proc::ProcessingRequest::kRequestBody:
        Body(response_.mutable_request_body(), request_.mutable_request_body());
        break;
      case ext_proc::ProcessingRequest::kResponseBody:
        Body(response_.mutable_response_body(), request_.mutable_response_body());
        break;
      case ext_proc::ProcessingRequest::kRequestTrailers:
        response_.mutable_request_trailers();
        break;
      case ext_proc::ProcessingRequest::kResponseTrailers:
        response_.mutable_response_trailers();
        break;
      case ext_proc::ProcessingRequest::REQUEST_NOT_SET:
        break;
    }
  }

  void Body(ext_proc::BodyResponse* answer, ext_proc::HttpBody* body) {
    if (!duplex_) return;
    auto* streamed = answer->mutable_response()->mutable_body_mutation()->mutable_streamed_response();
    streamed->mutable_body()->swap(*body->mutable_body());
    streamed->set_end_of_stream(body->end_of_stream());
  }

  ext_proc::ProcessingRequest request_;
  ext_proc::ProcessingResponse response_;
  bool duplex_ = false;
};

class Service : public ext_proc::ExternalProcessor::CallbackService {
  grpc::ServerBidiReactor<ext_proc::ProcessingRequest, ext_proc::ProcessingResponse>* Process(
      grpc::CallbackServerContext*) override {
    return new Stream;
  }
};

}  // namespace

int main(int count, char** words) {
  if (count < 3) {
    std::fprintf(stderr, "usage: %s LISTEN ENDPOINT...\n", words[0]);
    return 2;
  }
  endpoints.assign(words + 2, words + count);
  grpc::EnableDefaultHealthCheckService(true);
  Service service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(words[1], grpc::InsecureServerCredentials());
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterService(&service);
  auto server = builder.BuildAndStart();
  if (!server) return 1;
  server->GetHealthCheckService()->SetServingStatus(true);
  server->GetHealthCheckService()->SetServingStatus("envoy.service.ext_proc.v3.ExternalProcessor", true);
  server->Wait();
}
