// A reward server of your own in Go, over HTTP, with the standard library alone: go run server.go [PORT]
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
)

const maxBytes = 80 << 20

// The fields that this server reads; all others are ignored.
type item struct {
	ItemID      string `json:"item_id"`
	Response    string `json:"response"`
	GroundTruth string `json:"ground_truth_json"`
}
type object map[string]any

// One item in, one typed outcome out. Here: is the response the ground truth?
func judge(it item) object {
	if it.GroundTruth == "" {
		return object{"unscorable": object{"reason": "the row has no ground truth"}}
	}
	var truth any
	if err := json.Unmarshal([]byte(it.GroundTruth), &truth); err != nil {
		// A failure is said, never scored as zero.
		return object{"error": object{"code": "bad_input", "message": err.Error()}}
	}
	correct := 0.0
	if strings.TrimSpace(it.Response) == strings.TrimSpace(fmt.Sprint(truth)) {
		correct = 1
	}
	return object{"scored": object{"total": correct, "components": object{"correct": correct}}}
}

func answer(w http.ResponseWriter, message object) {
	json.NewEncoder(w).Encode(message)
}

func score(w http.ResponseWriter, r *http.Request) {
	var request struct{ Items []item }
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBytes)).Decode(&request)
	if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
		http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
		return
	} else if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	results := []object{}
	for _, it := range request.Items {
		if r.Context().Err() != nil { // the caller has given up
			return
		}
		result := judge(it)
		result["item_id"] = it.ItemID
		results = append(results, result)
	}
	answer(w, object{"results": results})
}

func main() {
	port := append(os.Args, "50061")[1]
	listener, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		panic(err)
	}
	http.HandleFunc("POST /v1/score", score)
	http.HandleFunc("GET /v1/info", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, object{"name": "go-example", "version": "1", "deterministic": true, "wants_ids": false})
	})
	fmt.Println("listening on", listener.Addr())
	panic(http.Serve(listener, nil))
}
